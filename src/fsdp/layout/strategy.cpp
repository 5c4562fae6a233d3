#include "fsdp/layout/strategy.h"

#include <array>
#include <charconv>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/foreign_words.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

constexpr Placement kR = Placement::kReplicate;
constexpr Placement kS = Placement::kShard;
constexpr Placement kP = Placement::kPartial;

constexpr std::string_view kHsdp = "+hsdp";
constexpr std::string_view kHfsdp = "+hfsdp";

constexpr Strategy shard_outer(Strategy strategy, std::string_view name) {
  strategy.name = name;
  strategy.optimizer.outer = kS;
  return strategy;
}

constexpr std::array<Strategy, 7> kNamed = {
    Strategy::no_shard,
    Strategy::optim,
    Strategy::optim_grads,
    Strategy::optim_grads_params,
    shard_outer(Strategy::optim, "optim+hfsdp"),
    shard_outer(Strategy::optim_grads, "optim_grads+hfsdp"),
    shard_outer(Strategy::optim_grads_params, "optim_grads_params+hfsdp"),
};

std::optional<Strategy> find_named(std::string_view name) {
  for (const Strategy& row : kNamed) {
    if (row.name == name) return row;
  }
  return std::nullopt;
}

// The named row with these placements, else they themselves as "custom".
Strategy named_or_custom(Strategy strategy) {
  for (const Strategy& row : kNamed) {
    strategy.name = row.name;
    if (strategy == row) return row;
  }
  strategy.name = "custom";
  return strategy;
}

// "RS/PS/SS"
std::optional<Strategy> parse_triple(std::string_view text) {
  if (text.size() != 8 || text[2] != '/' || text[5] != '/') return std::nullopt;
  const auto parameter = parse_placement_pair(text.substr(0, 2));
  const auto gradient = parse_placement_pair(text.substr(3, 2));
  const auto optimizer = parse_placement_pair(text.substr(6, 2));
  if (!parameter || !gradient || !optimizer) return std::nullopt;
  return named_or_custom({.parameter = *parameter, .gradient = *gradient, .optimizer = *optimizer});
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
    // Not in the table, so it will be illegal; hfsdp() says why better than "unknown".
    const auto row = find_named(text.substr(0, text.size() - kHfsdp.size()));
    if (!row || row->name.ends_with(kHfsdp)) return std::nullopt;
    return row->hfsdp();
  }
  return parse_triple(text);
}

}  // namespace

char letter_of(Placement placement) {
  switch (placement) {
    case Placement::kReplicate:
      return 'R';
    case Placement::kShard:
      return 'S';
    case Placement::kPartial:
      return 'P';
  }
  return '?';
}

std::string to_text(PlacementPair pair) { return {letter_of(pair.outer), letter_of(pair.inner)}; }

std::optional<PlacementPair> parse_placement_pair(std::string_view text) {
  for (const PlacementPair pair : kAllPlacementPairs) {
    if (to_text(pair) == text) return pair;
  }
  return std::nullopt;
}

Strategy Strategy::hfsdp() const {
  const Strategy sharded = named_or_custom(shard_outer(*this, name));
  check_legal(sharded);
  return sharded;
}

std::span<const Strategy> named_strategies() { return kNamed; }

Strategy parse_strategy(std::string_view text) {
  std::vector<std::string> names;
  for (const Strategy& row : kNamed) names.emplace_back(row.name);
  std::optional<Strategy> strategy = parse_known(text);
  if (!strategy) strategy = parse_known(same_value(text, names));  // "zero3"
  if (!strategy) {
    throw UsageError(concat("strategy '", text, "' is unknown; ", meant_text(text, names),
                            "use one of ", join(names, ", "),
                            " (or zero1, zero2, zero3, fsdp, hsdp), or placements (outer, inner) "
                            "of parameter/gradient/optimizer such "
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

std::string to_text(Granularity granularity) {
  switch (granularity.kind) {
    case Granularity::Kind::kElement:
      return "element";
    case Granularity::Kind::kRow:
      return "row";
    case Granularity::Kind::kBlock:
      return concat("block(", granularity.block_numel, ")");
    case Granularity::Kind::kTensor:
      return "tensor";
  }
  return "?";
}

Granularity parse_granularity(std::string_view text) {
  for (const Granularity plain :
       {Granularity::element(), Granularity::row(), Granularity::tensor()}) {
    if (text == to_text(plain)) return plain;
  }
  constexpr std::string_view kOpening = "block(";
  if (text.starts_with(kOpening) && text.ends_with(")")) {
    const std::string_view digits = text.substr(kOpening.size(), text.size() - kOpening.size() - 1);
    int64_t numel = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), numel);
    if (error == std::errc() && end == digits.data() + digits.size() && numel > 0) {
      return Granularity::block(numel);
    }
  }
  const std::array<std::string, 4> names = {"element", "row", "block(128)", "tensor"};
  const std::string guess = nearest(text, names);
  throw UsageError(concat("granularity '", text, "' is unknown; ",
                          guess.empty() ? "" : concat("did you mean '", guess, "'? "),
                          "use element, row, block(n) with n >= 1, or tensor"));
}

int64_t indivisible_numel(Granularity granularity, std::span<const int64_t> shape) {
  switch (granularity.kind) {
    case Granularity::Kind::kElement:
      return 1;
    case Granularity::Kind::kBlock:
      return granularity.block_numel;
    case Granularity::Kind::kRow:
    case Granularity::Kind::kTensor:
      break;
  }
  int64_t numel = 1;
  const size_t first_dim = granularity.kind == Granularity::Kind::kRow ? 1 : 0;
  for (size_t d = first_dim; d < shape.size(); ++d) numel = checked_mul(numel, shape[d]);
  return numel;
}

}  // namespace fsdp
