#include "fsdp/layout/granularity.h"

#include <array>
#include <charconv>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"

namespace fsdp {

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
