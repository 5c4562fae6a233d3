#include "fsdp/train/report/page_frame.h"

#include <array>
#include <ctime>

#include "fsdp/base/text.h"
#include "fsdp/base/version.h"
#include "fsdp/train/log/utf8_text.h"

namespace fsdp::train {

std::string page_html(const Page& page) {
  const std::string title = html_text(page.title);
  return concat(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width,initial-scale=1\"><meta name=\"generator\" "
      "content=\"fsdp.cpp " FSDP_VERSION "\">",
      // The page loads nothing, whatever its texts say.
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
      "'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">",
      page.is_live ? "<meta http-equiv=\"refresh\" content=\"15\">" : "",
      // Keeps the browser from asking for a favicon.
      "<link rel=\"icon\" href=\"data:,\"><title>", title, "</title><style>", page_style(),
      "</style></head><body><main>\n<h1>", title, "</h1>\n", page.body,
      "\n<footer>fsdp.cpp " FSDP_VERSION ", ", utc_text(page.time), "</footer>\n</main><script>",
      page_script(), "</script></body></html>\n");
}

std::string utc_text(double time) {
  const auto seconds = static_cast<std::time_t>(time);
  std::tm parts{};
  std::array<char, 64> text{};
  if (::gmtime_r(&seconds, &parts) == nullptr) return "";
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &parts);
  return text.data();
}

}  // namespace fsdp::train
