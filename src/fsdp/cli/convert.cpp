// `fsdp convert`: checkpoints to HuggingFace's files and back, with one chunk in memory at a time.
#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/log.h"
#include "fsdp/checkpoint/format/model_files.h"
#include "fsdp/checkpoint/names/name_tables.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/checkpoint/tools/converted_files.h"
#include "fsdp/cli/command.h"
#include "fsdp/cli/progress.h"
#include "fsdp/plan/load_model.h"
#include "fsdp/train/log/console.h"
#include "fsdp/train/model/adapters.h"

namespace fsdp::cli {

namespace {

constexpr int64_t kMaxTextBytes = int64_t{1} << 28;

// The options as typed; empty for one that was not given.
struct ConvertArguments {
  std::string source;
  std::string target;
  std::string to;
  std::string dtype;
  std::string max_shard_size;
  std::string ranks;
  std::string names;
  std::string config;
  std::string base;
  bool merge = false;
  bool overwrite = false;
};

enum class Form : uint8_t { kHuggingFace, kSharded, kPeft };

struct ConvertOptions {
  Form form = Form::kHuggingFace;
  std::optional<DType> dtype;
  int64_t max_file_bytes = HuggingFaceOptions{}.max_file_bytes;
  int64_t ranks = 1;
  NameRules names;
};

ConvertOptions convert_options_of(const ConvertArguments& given) {
  if (given.source.empty() || given.target.empty())
    throw UsageError("SRC and DST are needed; e.g. fsdp convert run/ exported/ --to hf");
  if (given.to.empty())
    throw UsageError(
        "--to is missing; use hf (files for HuggingFace's packages), sharded (a checkpoint of "
        "fsdp.cpp) or peft (adapters of a run with --lora)");
  ConvertOptions options;
  const std::vector<std::string> forms = {"hf", "sharded", "peft"};
  options.form = static_cast<Form>(parse_choice("--to", given.to, forms));
  if (given.merge && options.form != Form::kHuggingFace)
    refuse_option("--to", given.to, "--merge makes whole weights, which are for --to hf");
  if (!given.base.empty() && !given.merge)
    refuse_option("--base", given.base, "it is for --merge; give that, too");
  const std::vector<std::string> dtypes = {"fp32", "bf16", "fp16"};
  if (!given.dtype.empty())
    options.dtype = parse_dtype(dtypes[parse_choice("--dtype", given.dtype, dtypes)]);
  if (!given.max_shard_size.empty()) {
    options.max_file_bytes = parse_bytes("--max-shard-size", given.max_shard_size);
    if (options.form != Form::kHuggingFace)
      refuse_option(
          "--max-shard-size", given.max_shard_size,
          "it is for --to hf; a sharded checkpoint is cut by --ranks, and adapters never");
  }
  if (!given.ranks.empty()) {
    options.ranks = parse_whole_number("--ranks", given.ranks, 1, kMaxRanks);
    if (options.form != Form::kSharded)
      refuse_option("--ranks", given.ranks,
                    "it is for --to sharded; files for HuggingFace are cut by --max-shard-size");
  }
  if (!given.names.empty())
    options.names = parse_name_rules(read_text_file(given.names, kMaxTextBytes), given.names);
  return options;
}

struct ConfigFile {
  std::string text;
  std::string source;  // its path
};

// Adapters that PEFT wrote have none; that of their base describes the merged model, too.
std::optional<ConfigFile> find_config(const ConvertArguments& given, const TensorCatalog& catalog,
                                      const std::optional<TensorCatalog>& base) {
  if (!given.config.empty())
    return ConfigFile{read_text_file(given.config, kMaxTextBytes), given.config};
  for (const TensorCatalog* each : {&catalog, base ? &*base : nullptr}) {
    if (each == nullptr) continue;
    if (std::optional<std::string> text = each->model_config())
      return ConfigFile{*text, concat(each->path(), "/", kModelConfigName)};
  }
  return std::nullopt;
}

// The tensors of published files: one, or its parts.
std::vector<NamedShape> stored_tensors(const TensorShape& tensor) {
  if (tensor.parts.empty()) return {{tensor.name, tensor.shape}};
  std::vector<int64_t> shape = tensor.shape;
  shape[0] /= static_cast<int64_t>(tensor.parts.size());
  std::vector<NamedShape> stored;
  for (const std::string& part : tensor.parts) stored.push_back({part, shape});
  return stored;
}

// nullopt for an unknown kind of model, with a message.
std::optional<ExpectedWeights> expected_by(const std::optional<ConfigFile>& config) {
  if (!config) return std::nullopt;
  const std::string type = model_type_of(config->text, config->source);
  if (!is_known_model_type(type)) {
    log(LogLevel::kWarning, config->source, ": model_type '", type,
        "' is not known here; names and shapes are converted as they are, unchecked");
    return std::nullopt;
  }
  ExpectedWeights expected{.source = config->source,
                           .tensors = {},
                           .ties_head = ties_word_embeddings(config->text, config->source)};
  for (const UnitShape& unit : parse_model(config->text, config->source).units)
    for (const std::vector<TensorShape>* tensors : {&unit.tensors, &unit.buffers})
      for (const TensorShape& tensor : *tensors)
        for (NamedShape& stored : stored_tensors(tensor))
          expected.tensors.push_back(std::move(stored));
  return expected;
}

// Buffers change by less than a narrow type could tell.
std::set<std::string> buffers_of(const std::optional<ConfigFile>& config) {
  std::set<std::string> names;
  if (!config || !is_known_model_type(model_type_of(config->text, config->source))) return names;
  for (const UnitShape& unit : parse_model(config->text, config->source).units)
    for (const TensorShape& buffer : unit.buffers) names.insert(buffer.name);
  return names;
}

WeightSelection select(const TensorCatalog& catalog, const NameRules& rules,
                       const std::optional<ExpectedWeights>& expected) {
  const TensorSet model = fsdp::apply(rules, catalog.model());
  WeightSelection selection =
      expected ? select_weights(catalog, model, *expected, rules) : select_all(catalog, model);
  if (!selection.left_out.empty()) log(LogLevel::kInfo, "left out: ", some_of(selection.left_out));
  return selection;
}

// One conversion: from a catalog to a directory that appears complete at the end.
class Conversion {
 public:
  Conversion(const ConvertArguments& given, const ConvertOptions& options)
      : options_(options),
        catalog_(checkpoint_or_files(given.source)),
        adapters_(train::stored_adapters(catalog_.path())),
        base_(open_base(given)),
        config_(find_config(given, catalog_, base_)),
        directory_(given.target, given.overwrite ? StagedDirectory::Existing::kReplace
                                                 : StagedDirectory::Existing::kRefuse) {}

  // Returns a sentence about the written files.
  std::string run() {
    const auto start = std::chrono::steady_clock::now();
    const size_t num_files = options_.form == Form::kHuggingFace ? to_huggingface()
                             : options_.form == Form::kPeft      ? to_peft()
                                                                 : to_sharded();
    directory_.publish();
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    return concat(counted_text(num_tensors_, "tensor"), ", ", counted_text(numel_, "parameter"),
                  ", ", bytes_text(total_bytes_), " in ",
                  counted_text(static_cast<int64_t>(num_files), "file"), ", ",
                  train::duration_text(passed.count()));
  }

 private:
  // The weights that adapters are merged into.
  std::optional<TensorCatalog> open_base(const ConvertArguments& given) const {
    if (!adapters_ && (given.merge || options_.form == Form::kPeft))
      throw UsageError(concat(catalog_.path(), " has no adapters; ",
                              given.merge ? "drop --merge" : "use --to hf"));
    if (adapters_ && options_.form == Form::kHuggingFace && !given.merge)
      throw UsageError(concat(catalog_.path(),
                              " holds adapters alone; --merge makes whole weights of them, and "
                              "--to peft writes them for PEFT"));
    if (adapters_ && options_.form == Form::kSharded && train::is_of_peft(catalog_.path()))
      throw UsageError(concat(catalog_.path(),
                              " holds adapters alone, which a run takes as they are: fsdp train "
                              "--init ",
                              catalog_.path()));
    if (!given.merge) return std::nullopt;
    return TensorCatalog(train::find_base(*adapters_, given.base, "--base"));
  }

  size_t to_peft() {
    const std::vector<CatalogTensor> tensors = train::tensors_for_peft(catalog_);
    ConvertedReads reads = reads_of(catalog_, options_.dtype);
    count(tensors, reads);
    return write_huggingface_files(directory_.path(), tensors, reads,
                                   {.model_files = published_files(train::AdapterReader::kPeft),
                                    .name = "adapter_model"})
        .size();
  }

  // Those of the checkpoint; the description of adapters as `reader` wants it, and without one only
  // where they are. PEFT writes at most a tokenizer beside adapters; the rest is the base's.
  std::vector<ModelFile> published_files(std::optional<train::AdapterReader> reader) const {
    std::vector<ModelFile> files = stored_model_files(catalog_.path());
    if (base_ && train::is_of_peft(catalog_.path()))
      for (ModelFile& file : stored_model_files(base_->path()))
        if (std::none_of(files.begin(), files.end(),
                         [&](const ModelFile& mine) { return mine.name == file.name; }))
          files.push_back(std::move(file));
    std::erase_if(files,
                  [](const ModelFile& file) { return file.name == train::kAdapterConfigName; });
    if (adapters_ && reader)
      files.push_back({train::kAdapterConfigName, to_json(*adapters_, *reader)});
    return files;
  }

  size_t to_huggingface() {
    if (!config_)
      log(LogLevel::kWarning, catalog_.path(),
          " has no config.json, so none is written and names "
          "are not checked; give one with --config");
    const TensorCatalog& weights = base_ ? *base_ : catalog_;
    const WeightSelection selection = select(weights, options_.names, expected_by(config_));
    ConvertedReads reads = reads_of(weights, export_dtype());
    std::optional<train::MergedAdapters> merged;
    if (base_)
      reads.set_change(
          merged.emplace(catalog_, adapters_->lora, selection.tensors, base_->path()).change());
    count(selection.tensors, reads);
    HuggingFaceOptions options{.max_file_bytes = options_.max_file_bytes};
    if (config_) options.config = config_->text;
    options.model_files = published_files(std::nullopt);
    return write_huggingface_files(directory_.path(), selection.tensors, reads, options).size();
  }

  // A run stores its main weights, as a rule fp32; a model that was published in another type is
  // exported in that type.
  std::optional<DType> export_dtype() const {
    const bool is_trained = catalog_.manifest() && !catalog_.manifest()->optimizer.name.empty();
    if (options_.dtype || !config_ || !is_trained) return options_.dtype;
    return published_dtype(config_->text, config_->source);
  }

  size_t to_sharded() {
    ConvertedReads model = reads_of(catalog_, options_.dtype);
    ConvertedReads moments = reads_of(catalog_, std::nullopt);
    ShardedContent content = catalog_.manifest() ? content_of_ours() : content_of_others();
    content.model_files = published_files(train::AdapterReader::kOurs);
    if (config_)
      content.model_files.push_back(
          {std::string(kModelConfigName),
           options_.dtype ? with_stored_dtype(config_->text, config_->source, *options_.dtype)
                          : config_->text});
    count(content.model, model);
    for (const CatalogTensor& tensor : content.moments)
      total_bytes_ += moments.bytes_of(tensor.tensor);
    if (!catalog_.manifest())
      content.manifest.precision =
          concat("weights alone, ", name_of(main_dtype(content.model, model)));
    write_sharded_files(directory_.path(), content, model, moments, {.ranks = options_.ranks});
    return read_manifest(directory_.path()).files.size() + 1;
  }

  ShardedContent content_of_others() {
    if (!config_)
      log(LogLevel::kWarning, catalog_.path(),
          " has no config.json, so names and shapes are not "
          "checked; give one with --config");
    const WeightSelection selection = select(catalog_, NameRules(), expected_by(config_));
    return {.model = apply_in_order(options_.names, selection.tensors)};
  }

  ShardedContent content_of_ours() {
    ShardedContent content;
    content.manifest = *catalog_.manifest();
    content.ranks = catalog_.ranks();
    content.model = select_all(catalog_, fsdp::apply(options_.names, catalog_.model())).tensors;
    for (const auto& [name, tensor] : moments_of(catalog_, options_.names))
      content.moments.push_back(tensor);
    if (content.manifest.num_ranks() != options_.ranks)
      log(LogLevel::kWarning, "left out: random states and data positions of ",
          content.manifest.num_ranks(), " ranks, which mean nothing to ", options_.ranks);
    return content;
  }

  ConvertedReads reads_of(const TensorCatalog& catalog, std::optional<DType> dtype) {
    return {catalog.files(), dtype,
            [this](int64_t bytes) {
              done_bytes_ += bytes;
              progress_.update(done_bytes_, total_bytes_);
            },
            buffers_of(config_)};
  }

  void count(std::span<const CatalogTensor> tensors, const ConvertedReads& reads) {
    num_tensors_ = static_cast<int64_t>(tensors.size());
    for (const CatalogTensor& tensor : tensors) {
      numel_ += numel_of(tensor.tensor);
      total_bytes_ += reads.bytes_of(tensor.tensor);
    }
  }

  const ConvertOptions& options_;
  const TensorCatalog catalog_;
  const std::optional<train::AdapterDescription> adapters_;
  const std::optional<TensorCatalog> base_;
  const std::optional<ConfigFile> config_;
  StagedDirectory directory_;
  Progress progress_{"convert"};
  int64_t num_tensors_ = 0;
  int64_t numel_ = 0;
  int64_t total_bytes_ = 0;
  int64_t done_bytes_ = 0;
};

void run_convert(const ConvertArguments& given) {
  const ConvertOptions options = convert_options_of(given);
  std::string summary;
  try {
    summary = Conversion(given, options).run();
  } catch (const UsageError& error) {
    // A fault of the files is not a wrong use of the command.
    throw Error(error.what());
  }
  std::cout << "wrote " << given.target << ": " << summary << "\n";
}

constexpr const char* kConvertFooter =
    "SRC is a checkpoint, the directory of a run (then its latest checkpoint), a safetensors file "
    "or "
    "a directory\nwith safetensors files. DST appears when it is complete, and not at all when "
    "something fails.\n"
    "Examples:\n"
    "  fsdp convert runs/7b exported --to hf --dtype bf16\n"
    "  fsdp convert runs/lora adapters --to peft\n"
    "  fsdp convert runs/lora merged --to hf --merge\n"
    "  fsdp convert PEFT-adapters merged --to hf --merge --base Llama-3.2-1B\n"
    "  fsdp convert Llama-3.2-1B start --to sharded --ranks 8\n"
    "  fsdp convert runs/7b/step-00001000 again --to sharded --ranks 4\n"
    "docs/checkpoints.md tells more.";

}  // namespace

Command add_convert(CLI::App& parent) {
  CLI::App* app =
      parent.add_subcommand("convert", "Convert checkpoints to HuggingFace's files and back");
  app->footer(kConvertFooter);
  const auto given = std::make_shared<ConvertArguments>();
  const auto option = [&](const char* name, std::string& value, const char* type,
                          const char* text) {
    app->add_option(name, value, text)->type_name(type);
  };
  option("SRC", given->source, "", "What to convert");
  option("DST", given->target, "", "The directory to write");
  option("--to", given->to, "hf|sharded|peft",
         "hf: whole tensors for HuggingFace's packages; sharded: a checkpoint of fsdp.cpp; peft: "
         "adapters of a run with --lora, for PEFT");
  app->add_flag("--merge", given->merge,
                "With --to hf: add adapters to the weights that they were trained on");
  option("--base", given->base, "PATH",
         "With --merge: these weights, where they are not where they were");
  option("--dtype", given->dtype, "DTYPE",
         "Type of floating-point weights: fp32, bf16 or fp16, rounded to nearest; default: as they "
         "are; of a trained model --to hf: the type in config.json");
  option("--max-shard-size", given->max_shard_size, "BYTES",
         "With --to hf: the most that a file holds; default 5GB");
  option("--ranks", given->ranks, "N",
         "With --to sharded: how many ranks' files to cut into; default 1. Any number of ranks can "
         "load them");
  option("--config", given->config, "FILE", "The model's config.json, in place of the one in SRC");
  option("--names", given->names, "FILE.json",
         "Rules that rename or divide tensors (docs/checkpoints.md)");
  app->add_flag("--overwrite", given->overwrite,
                "Replace DST if it is a checkpoint or a directory with safetensors files");
  return {app, [given] { run_convert(*given); }};
}

}  // namespace fsdp::cli
