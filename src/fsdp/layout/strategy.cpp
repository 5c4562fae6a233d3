#include "fsdp/layout/strategy.h"

#include <array>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"

namespace fsdp {
namespace {

constexpr Placement kR = Placement::kReplicate;
constexpr Placement kS = Placement::kShard;
constexpr Placement kP = Placement::kPartial;

constexpr std::string_view kHsdp = "+hsdp";
constexpr std::string_view kHfsdp = "+hfsdp";

// The outer gradient placement is always Partial: gradients cross the outer axis once per step,
// when the last microbatch is done, and not once per backward.
constexpr std::array<Strategy, 7> kNamed = {{
    {.name = "no_shard", .parameter = {kR, kR}, .gradient = {kP, kP}, .optimizer = {kR, kR}},
    {.name = "optim", .parameter = {kR, kR}, .gradient = {kP, kP}, .optimizer = {kR, kS}},
    {.name = "optim_grads", .parameter = {kR, kR}, .gradient = {kP, kS}, .optimizer = {kR, kS}},
    {.name = "optim_grads_params",
     .parameter = {kR, kS},
     .gradient = {kP, kS},
     .optimizer = {kR, kS}},
    {.name = "optim+hfsdp", .parameter = {kR, kR}, .gradient = {kP, kP}, .optimizer = {kS, kS}},
    {.name = "optim_grads+hfsdp",
     .parameter = {kR, kR},
     .gradient = {kP, kS},
     .optimizer = {kS, kS}},
    {.name = "optim_grads_params+hfsdp",
     .parameter = {kR, kS},
     .gradient = {kP, kS},
     .optimizer = {kS, kS}},
}};

std::optional<Strategy> find_named(std::string_view name) {
  for (const Strategy& row : kNamed) {
    if (row.name == name) return row;
  }
  return std::nullopt;
}

// "RS/PS/SS"
std::optional<Strategy> parse_triple(std::string_view text) {
  if (text.size() != 8 || text[2] != '/' || text[5] != '/') return std::nullopt;
  const auto parameter = parse_placement_pair(text.substr(0, 2));
  const auto gradient = parse_placement_pair(text.substr(3, 2));
  const auto optimizer = parse_placement_pair(text.substr(6, 2));
  if (!parameter || !gradient || !optimizer) return std::nullopt;
  for (const Strategy& row : kNamed) {
    if (row.parameter == *parameter && row.gradient == *gradient && row.optimizer == *optimizer) {
      return row;
    }
  }
  return Strategy{.parameter = *parameter, .gradient = *gradient, .optimizer = *optimizer};
}

std::optional<Strategy> parse_known(std::string_view text) {
  if (const auto row = find_named(text)) return row;
  if (text.ends_with(kHsdp)) {
    const auto row = find_named(text.substr(0, text.size() - kHsdp.size()));
    // "+hfsdp+hsdp" asks for two outer modes at once.
    if (row && !row->name.ends_with(kHfsdp)) return row;
    return std::nullopt;
  }
  if (text.ends_with(kHfsdp)) {
    // Not in the table, so it will be illegal; the legality check says why better than "unknown".
    auto row = find_named(text.substr(0, text.size() - kHfsdp.size()));
    if (!row || row->name.ends_with(kHfsdp)) return std::nullopt;
    row->name = "custom";
    row->optimizer.outer = kS;
    return row;
  }
  return parse_triple(text);
}

}  // namespace

std::span<const Strategy> named_strategies() { return kNamed; }

Strategy parse_strategy(std::string_view text) {
  const std::optional<Strategy> strategy = parse_known(text);
  if (!strategy) {
    std::vector<std::string> names;
    for (const Strategy& row : kNamed) names.emplace_back(row.name);
    const std::string guess = nearest(text, names);
    throw UsageError(concat("strategy '", text, "' is unknown; ",
                            guess.empty() ? "" : concat("did you mean '", guess, "'? "),
                            "use one of ", join(names, ", "),
                            ", or placements (outer, inner) of parameter/gradient/optimizer such "
                            "as RS/PS/SS"));
  }
  check_legal(*strategy);
  return *strategy;
}

std::string to_text(const Strategy& strategy) {
  const std::optional<Strategy> row = find_named(strategy.name);
  if (row && *row == strategy) return std::string(strategy.name);
  return concat(to_text(strategy.parameter), "/", to_text(strategy.gradient), "/",
                to_text(strategy.optimizer));
}

std::optional<std::string> illegal_reason(const Strategy& strategy) {
  struct Buffer {
    const char* name;
    PlacementPair placed;
  };
  const Buffer parameter{"parameter", strategy.parameter};
  const Buffer gradient{"gradient", strategy.gradient};
  const Buffer optimizer{"optimizer", strategy.optimizer};
  const auto sentence = [&](const Buffer& buffer, const auto&... rest) {
    return concat("strategy ", to_text(strategy), ": the ", buffer.name, " placement ",
                  to_text(buffer.placed), rest...);
  };
  for (const Buffer& buffer : {parameter, optimizer}) {
    if (buffer.placed.outer == kP || buffer.placed.inner == kP) {
      return sentence(buffer, " has a partial axis, but only gradients are sums; use R or S");
    }
  }
  if (gradient.placed.outer == kR || gradient.placed.inner == kR) {
    return sentence(gradient,
                    " has a replicated axis, which would reduce every microbatch in full; "
                    "use P (reduced once per step) or S");
  }
  for (const Buffer& buffer : {parameter, gradient, optimizer}) {
    if (buffer.placed.outer == kS && buffer.placed.inner != kS) {
      return sentence(buffer,
                      " shards the outer axis but not the inner one, which is cut first; "
                      "shard the inner axis too");
    }
  }
  for (const Buffer& buffer : {parameter, gradient}) {
    if ((buffer.placed.outer == kS && optimizer.placed.outer != kS) ||
        (buffer.placed.inner == kS && optimizer.placed.inner != kS)) {
      return sentence(buffer, " shards an axis on which the optimizer placement ",
                      to_text(optimizer.placed),
                      " is whole, so its gradients would have to be gathered; shard the optimizer "
                      "there too");
    }
  }
  return std::nullopt;
}

void check_legal(const Strategy& strategy) {
  if (const auto reason = illegal_reason(strategy)) throw UsageError(*reason);
}

}  // namespace fsdp
