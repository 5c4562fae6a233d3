#include "fsdp/checkpoint/converted_reads.h"

#include <algorithm>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/base/shown_text.h"
#include "fsdp/checkpoint/tensor_values.h"

namespace fsdp {

ConvertedReads::ConvertedReads(std::span<const CheckedFile> files, std::optional<DType> dtype,
                               OnBytes on_bytes)
    : files_(files), dtype_(dtype), on_bytes_(std::move(on_bytes)) {}

DType ConvertedReads::dtype_of(const StoredTensor& tensor) const {
  return is_floating(tensor.dtype) ? dtype_.value_or(tensor.dtype) : tensor.dtype;
}

int64_t ConvertedReads::bytes_of(const StoredTensor& tensor) const {
  return numel_of(tensor) * element_bytes(dtype_of(tensor));
}

void ConvertedReads::read(const CatalogTensor& tensor, FlatRange range, std::byte* into) {
  const DType from = tensor.tensor.dtype;
  const DType to = dtype_of(tensor.tensor);
  const int64_t bytes = range.numel() * element_bytes(to);
  if (from == to) {
    read_elements(files_, tensor, range, into);
  } else {
    stored_.resize(static_cast<size_t>(range.numel() * element_bytes(from)));
    read_elements(files_, tensor, range, stored_.data());
    const int64_t num_overflows =
        convert_values(from, stored_, to, {into, static_cast<size_t>(bytes)});
    FSDP_CHECK(num_overflows == 0, "tensor '", shown(tensor.tensor.name), "' has ", num_overflows,
               " numbers that are too large for ", name_of(to), "; keep ", name_of(from),
               ", or choose a type with a larger range");
  }
  if (on_bytes_) on_bytes_(bytes);
}

}  // namespace fsdp
