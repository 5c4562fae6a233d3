#include "fsdp/train/run_data.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/rank_agreement.h"
#include "fsdp/data/corpus.h"
#include "fsdp/data/documents.h"
#include "fsdp/data/packed_documents.h"
#include "fsdp/data/token_file.h"
#include "fsdp/data/tokenizer.h"
#include "fsdp/train/model/published_model.h"

namespace fsdp::train {

namespace {

using TokenizerPointer = std::shared_ptr<const Tokenizer>;

bool has_text(const TrainOptions& options) {
  const auto is_text = [](const std::string& path) { return !is_token_file(path); };
  return std::any_of(options.data.begin(), options.data.end(), is_text) ||
         std::any_of(options.validation_data.begin(), options.validation_data.end(), is_text);
}

void check_tokenizer(const RunPlan& plan, const Tokenizer& tokenizer) {
  if (tokenizer.kind().tokenizer == plan.corpus->tokenizer()) return;
  throw UsageError(concat("--tokenizer is '", plan.options.tokenizer, "' (",
                          tokenizer.kind().tokenizer, "), but the data was packed with '",
                          plan.corpus->tokenizer(),
                          "'; give that tokenizer, or pack the data again"));
}

// For packed data; nullptr, with the reason in the plan, where its text cannot be written.
TokenizerPointer tokenizer_for_sample(RunPlan& plan) {
  if (plan.corpus->tokenizer() == kByteTokenizerName) return open_tokenizer(kByteTokenizerName);
  if (plan.tokenizer == kByteTokenizerName) return nullptr;
  try {
    TokenizerPointer tokenizer = open_tokenizer(plan.tokenizer);
    if (tokenizer->kind().tokenizer == plan.corpus->tokenizer()) return tokenizer;
  } catch (const Error& error) {
    // Training needs no tokenizer then.
    plan.no_sample = concat("no sample: ", error.what());
  }
  return nullptr;
}

// A chat that ends with its first question, or with --sample in its place; `question` is set to it
// as it is shown.
std::string chat_to_answer(const std::string& chat, const TrainOptions& options,
                           std::string& question) {
  nlohmann::json row = nlohmann::json::parse(chat);
  nlohmann::json messages = nlohmann::json::array();
  for (const nlohmann::json& each : row.at("messages")) {
    const bool is_question = each.at("role") == "user";
    if (is_question && options.sample == "auto" &&
        each.value("content", nlohmann::json()).is_string())
      question = each.at("content").get<std::string>();
    if (is_question || each.at("role") == "assistant") break;
    messages.push_back(each);
  }
  messages.push_back({{"role", "user"}, {"content", question}});
  question += "\n";
  row["messages"] = std::move(messages);
  return row.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void prepare_sample(RunPlan& plan, const Tokenizer& tokenizer) {
  plan.sample = plan.options.sample == "auto" ? "The " : plan.options.sample;
  const std::string& chat = plan.corpus->findings().first_chat;
  try {
    plan.sample_prompt =
        chat.empty() ? tokenizer.encode_prompt(plan.sample)
                     : tokenizer.encode_chat(chat_to_answer(chat, plan.options, plan.sample));
  } catch (const Error& error) {
    // A chat template may refuse a question that has no answer yet; training does not need one.
    plan.no_sample = concat("no sample: ", error.what());
  }
}

// The directory that keeps the tokens of this run's text; "": none does. Runs that name no
// directory share one.
std::string kept_tokens_of(const RunPlan& plan, const DataOpening& opening) {
  const std::string& run = plan.options.checkpoint_dir;
  if (run.empty() || !opening.keeps_tokens) return "";
  return concat(plan.given.checkpoint_dir == "auto" ? directory_of(run) : run, "/tokens");
}

// Tells the other processes of a run, who wait for it, that this one is still at work: their waits
// have a deadline.
class Turns {
 public:
  explicit Turns(Communicator& ranks) : ranks_(ranks) {}

  // Whether any rank is at work.
  bool meet(bool is_at_work) {
    const at::Tensor flag = at::tensor({int64_t{is_at_work ? 1 : 0}}, at::kLong);
    ranks_.all_reduce(flag, {.op = ReduceOp::kMax}, "tokenising").wait();
    last_met_ = Clock::now();
    return flag.item<int64_t>() != 0;
  }

  void meet_now_and_then() {
    if (Clock::now() - last_met_ > std::chrono::seconds(5)) meet(true);
  }

 private:
  using Clock = std::chrono::steady_clock;

  Communicator& ranks_;
  Clock::time_point last_met_ = Clock::now();
};

// Rank 0 tokenises, then the first process of each host that does not see its files; all others
// find the tokens. A rank that fails ends the others' waits.
template <typename Open>
void open_in_turns(const DataOpening& opening, bool keeps_tokens, const Open& open) {
  if (opening.ranks == nullptr) return open(opening.progress);
  Turns turns(*opening.ranks);
  // Ranks may have other settings by mistake, which nobody has compared yet.
  if (!turns.meet(keeps_tokens)) return open(opening.progress);
  const int mine = opening.ranks->rank() == 0 ? 0 : opening.local_rank == 0 ? 1 : 2;
  for (int turn = 0; turn < 3; ++turn) {
    if (turn == mine)
      open([&](const std::string& what, int64_t done, int64_t total) {
        if (opening.progress) opening.progress(what, done, total);
        turns.meet_now_and_then();
      });
    while (turns.meet(false)) {
    }
  }
}

// For messages: "chats.jsonl", "3 paths".
std::string name_of_paths(const std::vector<std::string>& paths) {
  return paths.size() == 1 ? file_name_of(paths.front()) : concat(paths.size(), " paths");
}

}  // namespace

void open_data(RunPlan& plan, const DataOpening& opening) {
  const TrainOptions& options = plan.options;
  plan.tokenizer = tokenizer_path(options.tokenizer, model_origins(plan));
  TokenizerPointer tokenizer;
  if (options.tokenizer != "auto" || has_text(options)) tokenizer = open_tokenizer(plan.tokenizer);
  CorpusOptions corpus{
      .tokenizer = tokenizer, .field = options.field, .kept_tokens = kept_tokens_of(plan, opening)};
  const auto open = [&](const DataProgress& progress) {
    const auto read = [&](const std::vector<std::string>& paths) {
      if (progress)
        corpus.progress = [&](int64_t done, int64_t total) {
          progress(name_of_paths(paths), done, total);
        };
      auto result = Corpus::open(paths, corpus);
      result->check_learnt();
      return result;
    };
    plan.corpus = read(options.data);
    if (!options.validation_data.empty()) plan.validation = read(options.validation_data);
  };
  const bool is_tokenised = tokenizer && plan.tokenizer != kByteTokenizerName && has_text(options);
  open_in_turns(opening, is_tokenised && !corpus.kept_tokens.empty(), open);
  std::vector<std::shared_ptr<const Corpus>> opened = {plan.corpus};
  if (plan.validation) opened.push_back(plan.validation);
  plan.data_check = std::make_shared<CorpusCheck>(std::move(opened));
  if (options.tokenizer != "auto") check_tokenizer(plan, *tokenizer);
  if (options.sample.empty()) return;
  if (!tokenizer) tokenizer = tokenizer_for_sample(plan);
  if (!tokenizer) return;
  if (tokenizer->kind().tokenizer == kByteTokenizerName) plan.tokenizer = kByteTokenizerName;
  prepare_sample(plan, *tokenizer);
  plan.end_tokens = tokenizer->ends();
}

void warn_of_rows(const RunPlan& plan) {
  for (const auto& corpus : {plan.corpus, plan.validation}) {
    if (!corpus) continue;
    std::vector<std::string> found = corpus->findings().sentences();
    found.push_back(cut_rows_text(*corpus, plan.options.sequence_length()));
    for (const std::string& each : found)
      if (!each.empty()) log(LogLevel::kWarning, each);
  }
  const bool is_validated = plan.options.validation_steps() > 0 && plan.windows &&
                            plan.windows->validation.num_windows() > 0;
  if (is_validated && !plan.windows->validation.have_learnt())
    log(LogLevel::kWarning,
        "there will be no validation loss: no window of the validation data "
        "has a token to learn; raise --sequence or --validation-fraction, or give "
        "--validation-data");
}

DataSplit split_data(const RunPlan& plan) {
  const TrainOptions& options = plan.options;
  DataSplit split = split_corpus(
      plan.corpus, {.sequence = options.sequence_length(),
                    .validation_fraction = plan.validation ? 0.0 : options.validation_fraction,
                    .by_path = !options.data_weights.empty(),
                    .content = content_of(*options.documents)});
  if (!split.training.have_learnt())
    throw UsageError(concat("no window of --sequence ", options.sequence_length(),
                            " has a token to learn: rows are cut before their answers begin; raise "
                            "--sequence"));
  return split;
}

WindowDocuments window_documents(std::optional<WindowDocuments> choice, const Corpus& corpus) {
  const bool are_rows = corpus.has_mask() && corpus.end_of_document().has_value();
  return choice.value_or(are_rows ? WindowDocuments::kSeparate : WindowDocuments::kJoined);
}

void check_documents(const RunPlan& plan) {
  const TrainOptions& options = plan.options;
  if (*options.documents == WindowDocuments::kJoined) return;
  const char* const kind =
      content_of(*options.documents) == WindowContent::kDocuments ? "packed" : "separate";
  for (const auto& corpus : {plan.corpus, plan.validation})
    if (corpus && !corpus->end_of_document())
      throw UsageError(concat("--documents is ", kind, ", but no token ends them in the ",
                              corpus == plan.corpus ? "data" : "validation data", " (tokenizer '",
                              corpus->tokenizer(),
                              "', end of document none); pack it with one, or use --documents "
                              "joined"));
  if (options.cuda_graph)
    throw UsageError(concat("--cuda-graph records a step whose documents have fixed lengths, but ",
                            plan.given.documents ? concat("--documents is ", kind)
                                                 : "data with loss masks are separate documents",
                            "; drop --cuda-graph, or use --documents joined"));
}

void compare_data(const RunPlan& plan, const Mesh& mesh) {
  uint64_t mine = plan.corpus->fingerprint();
  if (plan.validation) mine ^= std::rotl(plan.validation->fingerprint(), 1);
  const auto first =
      static_cast<uint64_t>(number_of_rank_0(mesh, static_cast<int64_t>(mine), "data fingerprint"));
  on_all_ranks(mesh, "comparing the data", [&] {
    FSDP_CHECK(mine == first, "rank ", rank_in(mesh), " reads other data than rank 0 (",
               fingerprint_text(mine), " and ", fingerprint_text(first),
               "); give all hosts the same files");
  });
}

void confirm_data(const RunPlan& plan, const Mesh& mesh) {
  on_all_ranks(mesh, "verifying the data", [&] { plan.data_check->wait(); });
}

StepBatches::StepBatches(int64_t microbatches, BatchMemory memory, c10::Device device,
                         Communicator& all)
    : memory_(memory), device_(device), all_(all), batches_(static_cast<size_t>(microbatches)) {}

void StepBatches::load(BatchLoader& loader) {
  RECORD_FUNCTION("fsdp::load_batches", {});
  std::vector<double> num_targets;
  for (ModelBatch& batch : batches_) {
    const TokenBatch read = loader.next();
    num_targets.push_back(static_cast<double>(read.num_targets));
    const ModelBatch next = to_model_batch(read, device_);
    if (memory_ == BatchMemory::kSame && batch.tokens.defined()) {
      batch.tokens.copy_(next.tokens);
      batch.targets.copy_(next.targets);
    } else {
      batch = next;
    }
  }
  if (loader.has_unlike_targets()) share_loss(num_targets);
}

// The step's loss is the mean over all its targets. The engine takes the mean over ranks, so a
// microbatch's share is its targets, divided by those of a mean rank. The host waits for the sum
// before the step begins, while the device still updates weights.
void StepBatches::share_loss(const std::vector<double>& num_targets) {
  const at::Tensor counts = at::tensor(num_targets, at::kDouble).to(device_);
  const at::Tensor of_mean_rank = counts.sum().view({1});
  all_.all_reduce(of_mean_rank, {.op = ReduceOp::kAvg}, "targets").wait();
  // A step without any target is not computed.
  have_targets_ = of_mean_rank.item<double>() > 0;
  const at::Tensor shares = (counts / of_mean_rank.clamp_min(1e-6)).to(at::kFloat);
  shares_ = shares_.defined() ? shares_.copy_(shares) : shares;
}

}  // namespace fsdp::train
