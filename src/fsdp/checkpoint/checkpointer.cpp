#include "fsdp/checkpoint/checkpointer.h"

#include <ATen/ATen.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/log.h"
#include "fsdp/base/start_thread.h"
#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/checkpoint/format/model_files.h"
#include "fsdp/checkpoint/format/safetensors_file.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/rank_agreement.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/checkpoint/state_pieces.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/optim/optimizer.h"
#include "fsdp/shard/engine/engine_views.h"

namespace fsdp {

namespace {

constexpr int64_t kMaxRecordBytes = int64_t{1} << 30;
// How long the destructor waits for other ranks' files, if nobody called wait().
constexpr std::chrono::seconds kPatienceForRanks{60};
constexpr std::chrono::seconds kPatienceInFailure{1};

}  // namespace

class Checkpointer::Impl {
 public:
  class Attempt;

  Impl(const std::string& directory, const Mesh& mesh, const CheckpointerOptions& options);

  // Ends the attempt under way, on all ranks; returns its error.
  std::exception_ptr end_attempt();

  std::unique_ptr<RunLock> lock_;  // rank 0 only; held until nothing is written any more
  const RunDirectory directory_;
  const Mesh& mesh_;
  const CheckpointerOptions options_;
  const std::string id_;         // of this run, the same on all ranks
  int64_t num_attempts_ = 0;     // the same on all ranks
  std::vector<int64_t> in_use_;  // steps
  mutable std::mutex saved_mutex_;
  mutable std::vector<SavedCheckpoint> saved_;  // guarded by saved_mutex_
  std::unique_ptr<Snapshot> snapshot_;
  std::unique_ptr<Attempt> attempt_;
};

// One save, from this rank's first file to the checkpoint's appearance. write() and, on rank 0,
// publish() run in a thread of their own or in the caller's; docs/checkpoints.md has the sequence.
class Checkpointer::Impl::Attempt {
 public:
  Attempt(const Impl& owner, const CheckpointState& state, const TrainingPosition& position)
      : owner_(owner),
        rank_(rank_in(owner.mesh_)),
        step_(position.step),
        id_(concat(owner.id_, "-", owner.num_attempts_)),
        temporary_(owner.directory_.temporary(step_, id_)) {
    try {
      prepare(state, position);
    } catch (...) {  // reported like all other errors, after all ranks are done
      error_ = std::current_exception();
    }
  }

  ~Attempt() {
    if (!thread_.joinable()) return;
    // During an exception the other ranks may be gone, and its message must not wait for them.
    const bool fails = std::uncaught_exceptions() > 0;
    const std::chrono::seconds patience = fails ? kPatienceInFailure : kPatienceForRanks;
    decide(std::chrono::steady_clock::now() + patience);
    thread_.join();
    if (error_) {
      log(LogLevel::kError, words_of(error_));
    } else if (rank_ == 0 && !is_published_) {
      log(LogLevel::kError, "the checkpoint of step ", step_, " was not saved: only ",
          num_records(), " of ", manifest_.num_ranks(),
          " ranks have written their part; what was there before still is");
    }
  }

  void copy_state(Snapshot& snapshot) noexcept {
    try {
      if (!error_) snapshot.take(pieces_);
    } catch (...) {
      error_ = std::current_exception();
    }
  }

  void run_in_background() {
    thread_ = start_thread("writing a checkpoint", [this] {
      write();
      {
        const std::lock_guard lock(mutex_);
        is_written_ = true;
      }
      changed_.notify_all();
      if (rank_ == 0) watch();
    });
  }

  // Writes this rank's files, its record last.
  void write() noexcept {
    if (error_) return;
    try {
      record_.files =
          write_pieces(temporary_, rank_,
                       {{"model", pieces_.model_pieces}, {"optimizer", pieces_.moment_pieces}},
                       owner_.options_.write);
      make_directories(temporary_ + "/ranks");
      write_file_durably(concat(temporary_, "/", rank_record_path(rank_)), to_json(record_));
    } catch (...) {
      error_ = std::current_exception();
      cancel();
    }
  }

  // Waits until this rank's part is written or has failed.
  void wait_written() {
    if (!thread_.joinable()) return;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_written_; });
  }

  // After all ranks have written or failed: rank 0 makes the checkpoint visible, or removes it.
  void end() noexcept {
    if (thread_.joinable()) {
      decide(std::chrono::steady_clock::now());
      thread_.join();
    }
    if (rank_ != 0 || is_published_) return;
    if (!error_) publish();
    if (!is_published_) remove();
  }

  // After end(), on all ranks: throws the error of this or another rank.
  void agree() const {
    agree_on_success(owner_.mesh_, error_, concat("saving the checkpoint of step ", step_));
  }

 private:
  void prepare(const CheckpointState& state, const TrainingPosition& position) {
    const StateView engine(state.sharded);
    engine.refuse_while_whole("save()");
    engine.wait();
    if (state.optimizer != nullptr) state.optimizer->wait();
    pieces_ = pieces_of(state, owner_.options_.form);
    manifest_ = describe(state, pieces_, step_);
    manifest_.schedule = position.schedule;
    manifest_.optimizer.settings = position.optimizer;
    record_ = {.rank = rank_,
               .block_bytes = owner_.options_.write.block_bytes,
               .files = {},
               .random_state = random_state(engine.device()),
               .data_position = position.data};
  }

  // Waits for the other ranks' records, to publish as soon as all are written.
  void watch() noexcept {
    auto pause = std::chrono::milliseconds(1);
    for (bool has_failed = false;;) {
      const bool is_complete = num_records() == manifest_.num_ranks();
      if (!has_failed && a_rank_has_failed(owner_.mesh_)) {
        has_failed = true;
        decide(std::chrono::steady_clock::now() + kPatienceInFailure);
      }
      std::unique_lock lock(mutex_);
      if (error_ || (deadline_ && std::chrono::steady_clock::now() >= *deadline_) || is_complete) {
        lock.unlock();
        if (is_complete && !error_) publish();
        return;
      }
      changed_.wait_for(lock, pause);
      pause = std::min(pause * 2, std::chrono::milliseconds(50));
    }
  }

  void decide(std::chrono::steady_clock::time_point deadline) {
    {
      const std::lock_guard lock(mutex_);
      deadline_ = std::min(deadline, deadline_.value_or(deadline));
    }
    changed_.notify_all();
  }

  int64_t num_records() const noexcept {
    try {
      int64_t count = 0;
      while (count < manifest_.num_ranks() &&
             path_exists(concat(temporary_, "/", rank_record_path(count))))
        ++count;
      return count;
    } catch (const std::exception&) {
      return 0;  // publish() will report it better
    }
  }

  void publish() noexcept {
    try {
      for (int64_t rank = 0; rank < manifest_.num_ranks(); ++rank) add_record(rank);
      add_model_files();
      write_file_durably(concat(temporary_, "/", kManifestName), to_json(manifest_));
      owner_.lock_->confirm();
      owner_.directory_.publish(step_, id_);
      is_published_ = true;
      note_saved();
    } catch (...) {
      error_ = std::current_exception();
    }
    if (is_published_) remove_old();
  }

  void note_saved() const {
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begun_;
    SavedCheckpoint saved{step_, owner_.directory_.path_of(step_), 0, taken.count()};
    for (const StoredFile& file : manifest_.files) saved.bytes += file.bytes;
    const std::lock_guard lock(owner_.saved_mutex_);
    owner_.saved_.push_back(std::move(saved));
  }

  // A saved checkpoint counts as saved, even if an old one cannot be removed.
  void remove_old() const noexcept {
    try {
      owner_.directory_.remove_old(owner_.options_.keep, owner_.in_use_);
    } catch (const std::exception& error) {
      log(LogLevel::kWarning, error.what());
    }
  }

  void add_record(int64_t rank) {
    const std::string name = rank_record_path(rank);
    const std::string path = concat(temporary_, "/", name);
    if (!path_exists(path))  // its own error says why, if it has one
      throw RemoteError(concat("the checkpoint of step ", step_, " was not saved: rank ", rank,
                               " has written no part that rank 0 sees in ", temporary_,
                               "; give all hosts one file system; what was there before still is"));
    const std::string text = read_text_file(path, kMaxRecordBytes);
    list_files(parse_rank_record(text, path), text, manifest_.files);
  }

  void add_model_files() {
    std::vector<ModelFile> files = owner_.options_.model_files;
    if (!owner_.options_.model_config.empty())
      files.push_back({std::string(kModelConfigName), owner_.options_.model_config});
    for (StoredFile& file : write_model_files(temporary_, files))
      manifest_.files.push_back(std::move(file));
  }

  // Removes this rank's files, because the next attempt may need the space.
  void cancel() noexcept {
    try {
      const std::string name = rank_text(rank_);
      for (const char* folder : {"model", "optimizer"})
        for (size_t i = 0;
             path_exists(concat(temporary_, "/", folder, "/", name, "-", i, ".safetensors")); ++i)
          remove_tree(concat(temporary_, "/", folder, "/", name, "-", i, ".safetensors"));
    } catch (const std::exception& error) {
      log(LogLevel::kWarning, error.what());
    }
  }

  void remove() const noexcept {
    try {
      remove_tree(temporary_);
    } catch (const std::exception& error) {
      log(LogLevel::kWarning, error.what());
    }
  }

  const Impl& owner_;
  const int64_t rank_;
  const int64_t step_;
  // A rank may begin the next attempt at the same step while another one still reads the outcome of
  // this one.
  const std::string id_;
  const std::string temporary_;
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  StatePieces pieces_;
  Manifest manifest_;
  RankRecord record_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr error_;
  bool is_written_ = false;
  bool is_published_ = false;
  // Until when rank 0 waits for others; nullopt: as long as training goes on.
  std::optional<std::chrono::steady_clock::time_point> deadline_;
};

Checkpointer::Impl::Impl(const std::string& directory, const Mesh& mesh,
                         const CheckpointerOptions& options)
    : directory_([&] {
        validate(options.keep);
        // The others get the id only afterwards, so nobody writes yet.
        const RunDirectory run(directory);
        on_all_ranks(mesh, "opening the directory of checkpoints", [&] {
          if (rank_in(mesh) != 0) return;
          make_directories(directory);
          lock_ = std::make_unique<RunLock>(directory);
          run.remove_temporaries();
        });
        return run;
      }()),
      mesh_(mesh),
      options_(options),
      id_(drawn_id(mesh, "checkpoint id")) {}

std::exception_ptr Checkpointer::Impl::end_attempt() {
  if (!attempt_) return nullptr;
  attempt_->wait_written();
  barrier(mesh_, "checkpoint written");
  const std::unique_ptr<Attempt> attempt = std::move(attempt_);
  attempt->end();
  try {
    attempt->agree();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

Checkpointer::Checkpointer(const std::string& directory, const Mesh& mesh,
                           const CheckpointerOptions& options)
    : impl_(std::make_unique<Impl>(directory, mesh, options)) {}
Checkpointer::~Checkpointer() = default;

void Checkpointer::save(const CheckpointState& state, const TrainingPosition& position) {
  if (position.step < 0)
    throw UsageError(concat("position.step is ", position.step, "; steps count from 0"));
  const std::exception_ptr earlier = impl_->end_attempt();
  ++impl_->num_attempts_;
  impl_->attempt_ = std::make_unique<Impl::Attempt>(*impl_, state, position);
  if (impl_->options_.mode == SaveMode::kBlocking) {
    impl_->attempt_->write();
    wait();
  } else {
    if (!impl_->snapshot_)
      impl_->snapshot_ = std::make_unique<Snapshot>(StateView(state.sharded).device());
    impl_->attempt_->copy_state(*impl_->snapshot_);
    impl_->attempt_->run_in_background();
  }
  if (earlier) std::rethrow_exception(earlier);
}

void Checkpointer::wait() {
  if (const std::exception_ptr error = impl_->end_attempt()) std::rethrow_exception(error);
}

std::vector<SavedCheckpoint> Checkpointer::take_saved() {
  const std::lock_guard lock(impl_->saved_mutex_);
  return std::exchange(impl_->saved_, {});
}

std::optional<LoadedCheckpoint> Checkpointer::load_latest(const CheckpointState& state,
                                                          const LoadOptions& options) {
  wait();
  // Another process may publish between the ranks' looks, so all load what rank 0 found.
  std::vector<int64_t> newest_first;
  on_all_ranks(impl_->mesh_, "looking for the latest checkpoint", [&] {
    if (rank_in(impl_->mesh_) != 0) return;
    newest_first = impl_->directory_.undamaged_first();
    impl_->directory_.refuse_remains();
  });
  for (size_t i = 0;; ++i) {
    const auto numbered = [&](size_t place) {
      const int64_t mine = place < newest_first.size() ? newest_first[place] : -1;
      return number_of_rank_0(impl_->mesh_, mine, "latest checkpoint");
    };
    const int64_t step = numbered(i);
    if (step < 0) return std::nullopt;
    const std::string path = impl_->directory_.path_of(step);
    try {
      LoadedCheckpoint loaded = load_checkpoint(path, state, options);
      impl_->in_use_ = {step};
      return loaded;
    } catch (const Error& failure) {
      // A mistake in the model or the options would be in every checkpoint.
      const bool has_damaged_tensors = dynamic_cast<const DamagedCheckpoint*>(&failure) != nullptr;
      if (rank_in(impl_->mesh_) == 0 && !has_damaged_tensors && !has_damaged_headers(path))
        newest_first.clear();
      const int64_t older = numbered(i + 1);
      if (older < 0) throw;
      if (rank_in(impl_->mesh_) == 0)
        log(LogLevel::kWarning, path,
            ": is damaged (fsdp inspect --verify shows where), so this run ", "goes on from ",
            checkpoint_name(older), ": ", failure.what());
    }
  }
}

void save_checkpoint(const std::string& directory, const CheckpointState& state,
                     const TrainingPosition& position, const CheckpointerOptions& options) {
  CheckpointerOptions blocking = options;
  blocking.mode = SaveMode::kBlocking;
  Checkpointer(directory, StateView(state.sharded).mesh(), blocking).save(state, position);
}

}  // namespace fsdp
