// Which tokenizer belongs to a model, and which tokens end what it says.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace fsdp::train {

// `given`, as --tokenizer says; for "auto" the tokenizer.json of the first of these directories (or
// of that of a file) that has one, and "bytes" if none has. See open_tokenizer().
std::string tokenizer_path(const std::string& given, std::span<const std::string> origins);

// "eos_token_id" of the generation_config.json and the config.json of a checkpoint, or of files of
// other tools.
std::vector<int64_t> stored_end_tokens(const std::string& checkpoint);

}  // namespace fsdp::train
