// The frame that every page of a report has: a head that forbids loading anything, style, script
// and footer.
#pragma once

#include <string>
#include <string_view>

namespace fsdp::train {

struct Page {
  std::string title = {};  // text
  std::string body = {};   // HTML below the title
  // Seconds since 1970, for the footer.
  double time = 0;
  // The page loads itself again from time to time.
  bool is_live = false;
};

// A whole document, complete without its script.
std::string page_html(const Page& page);

// "2026-11-17 09:30:00 UTC"
std::string utc_text(double time);

std::string_view page_style();

// Reads out the figures under a pointer, zooms into charts, and draws them over tokens.
std::string_view page_script();

}  // namespace fsdp::train
