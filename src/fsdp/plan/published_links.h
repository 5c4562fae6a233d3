// The speeds of links between GPUs that their makers publish, for plans of machines whose own were
// not measured.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/plan/forecast.h"
#include "fsdp/plan/rate_table.h"
#include "fsdp/plan/time_forecast.h"

namespace fsdp {

struct PublishedLink {
  std::string_view name;                     // "nvlink4"
  double bytes_per_s;                        // that a rank receives; collectives get less
  std::array<std::string_view, 2> machines;  // that have it between the GPUs of a host
};

// nullptr: no link is called so.
const PublishedLink* find_published_link(std::string_view name);

// "nvlink3, nvlink4, nvlink5, 400g"
std::string published_link_names();

// Sets the links that ranks need, where neither the user nor the table has any: NVLink between up
// to 8 neighbours, which are a host, and a card of 400 Gb/s beyond. Returns what it has set, which
// is nothing for machines that it does not know.
std::vector<UsedLink> add_published_links(TimeOptions& options, const PlanOptions& plan,
                                          const RateTable& rates);

}  // namespace fsdp
