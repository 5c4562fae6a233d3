// config.json, the description that models are published with: what writing weights needs of it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "fsdp/base/dtype.h"

namespace fsdp {

// "model_type"; "" where it does not say. UsageError, beginning with `source`, for what is no JSON
// object.
std::string model_type_of(std::string_view config, const std::string& source);

// "tie_word_embeddings": whether the head shares the embedding's weight. Default: no.
bool ties_word_embeddings(std::string_view config, const std::string& source);

// "dtype", or "torch_dtype" as it was called before: the type that the model is published in.
// nullopt where it does not say, or says one that weights are not converted to.
std::optional<DType> published_dtype(std::string_view config, const std::string& source);

// The same text with the type that the weights are stored in, everything else as it was. It is
// written as "torch_dtype", which every version of the transformers package reads, and as "dtype",
// which later versions write and prefer where both are there.
std::string with_stored_dtype(std::string_view config, const std::string& source, DType dtype);

}  // namespace fsdp
