#include "fsdp/plan/published_links.h"

#include <algorithm>
#include <optional>

#include "fsdp/base/text.h"

namespace fsdp {

namespace {

constexpr int64_t kGpusOfHost = 8;

constexpr PublishedLink kCard{"400g", 50e9, {}};
// In one direction; makers' pages name the sum of both.
constexpr std::array<PublishedLink, 4> kPublishedLinks = {{{"nvlink3", 300e9, {"A100"}},
                                                           {"nvlink4", 450e9, {"H100", "H200"}},
                                                           {"nvlink5", 900e9, {"B200"}},
                                                           kCard}};

const PublishedLink* link_of_host(const std::string& machine) {
  for (const PublishedLink& link : kPublishedLinks)
    for (const std::string_view name : link.machines)
      if (!name.empty() && machine.find(name) != std::string::npos) return &link;
  return nullptr;
}

}  // namespace

const PublishedLink* find_published_link(std::string_view name) {
  const auto* const found =
      std::find_if(kPublishedLinks.begin(), kPublishedLinks.end(),
                   [&](const PublishedLink& link) { return link.name == name; });
  return found == kPublishedLinks.end() ? nullptr : found;
}

std::string published_link_names() {
  std::vector<std::string> names;
  for (const PublishedLink& link : kPublishedLinks) names.emplace_back(link.name);
  return join(names, ", ");
}

std::vector<UsedLink> add_published_links(TimeOptions& options, const PlanOptions& plan,
                                          const RateTable& rates) {
  const PublishedLink* const of_host = link_of_host(rates.machine);
  const bool is_known = options.inner_link || rates.find("all_gather") != nullptr;
  if (is_known || of_host == nullptr || rates.device == "cpu") return {};
  std::vector<UsedLink> used;
  const auto add = [&](const char* axis, std::optional<LinkSpeed>& speed, int64_t neighbours) {
    if (speed || neighbours == 1) return;
    const PublishedLink& link = neighbours <= kGpusOfHost ? *of_host : kCard;
    speed = LinkSpeed{link.bytes_per_s, options.latency_us};
    used.push_back({axis, std::string(link.name), link.bytes_per_s});
  };
  add("inner", options.inner_link, plan.ranks / plan.outer);
  add("outer", options.outer_link, plan.outer == 1 ? 1 : plan.ranks);
  add("group", options.group_link, std::max(plan.tp, plan.ep));
  return used;
}

}  // namespace fsdp
