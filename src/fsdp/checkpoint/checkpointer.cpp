#include "fsdp/checkpoint/checkpointer.h"

#include <ATen/ATen.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/log.h"
#include "fsdp/base/start_thread.h"
#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/checkpoint/format/model_files.h"
#include "fsdp/checkpoint/format/piece_writer.h"
#include "fsdp/checkpoint/rank_agreement.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/checkpoint/state_pieces.h"
#include "fsdp/optim/optimizer.h"
#include "fsdp/shard/engine/engine.h"

namespace fsdp {

namespace {

constexpr int64_t kMaxRecordBytes = int64_t{1} << 30;
// How long the destructor waits for other ranks' files, if nobody called wait().
constexpr std::chrono::seconds kPatienceForRanks{60};
constexpr std::chrono::seconds kPatienceInFailure{1};

// 16 hexadecimal digits that tell the temporary directories of different runs apart.
std::string make_id(const Mesh& mesh) {
  std::random_device random;
  const auto mine = static_cast<int64_t>(uint64_t{random()} << 32 | random());
  auto number = static_cast<uint64_t>(number_of_rank_0(mesh, mine, "checkpoint id"));
  std::string digits;
  for (int i = 0; i < 16; ++i, number >>= 4) digits.push_back("0123456789abcdef"[number & 15]);
  return digits;
}

std::string error_text(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an unknown error";
  }
}

}  // namespace

// Functions without a comment here are those of Checkpointer.
class Checkpointer::Impl {
 public:
  Impl(const std::string& directory, const Mesh& mesh, const CheckpointerOptions& options);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void save(const CheckpointState& state, const TrainingPosition& position);
  void wait();
  std::optional<LoadedCheckpoint> load_latest(const CheckpointState& state,
                                              const LoadOptions& options);
  std::vector<SavedCheckpoint> take_saved();
  int64_t snapshot_bytes() const;

 private:
  class Attempt;

  // Ends the attempt under way, on all ranks; returns its error.
  std::exception_ptr end_attempt();
  void remove_leftover() noexcept;

  std::unique_ptr<RunLock> lock_;  // rank 0 only; held until nothing is written any more
  const RunDirectory directory_;
  const Mesh& mesh_;
  const CheckpointerOptions options_;
  const std::string id_;         // of this run, the same on all ranks
  int64_t num_attempts_ = 0;     // the same on all ranks
  std::vector<int64_t> in_use_;  // steps
  std::string leftover_;         // directory of a failed save; rank 0 only
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
      log(LogLevel::kError, error_text(error_));
    } else if (rank_ == 0 && !is_published_) {
      log(LogLevel::kError, "the checkpoint of step ", step_, " was not saved: only ",
          num_records(), " of ", manifest_.num_ranks(), " ranks have written their part after ",
          patience.count(), " s; what was there before still is");
    }
  }

  void copy_state(Snapshot& snapshot) noexcept {
    try {
      if (!error_) snapshot.take(pieces_);
    } catch (...) {
      error_ = std::current_exception();
    }
  }

  const std::string& temporary() const { return temporary_; }

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
      const FolderPieces folders[] = {{"model", pieces_.model_pieces},
                                      {"optimizer", pieces_.moment_pieces}};
      record_.files = write_pieces(temporary_, rank_, folders, owner_.options_.write);
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

  // After all ranks have written or failed: rank 0 makes the checkpoint visible, or removes all but
  // the empty directory, which tells the other ranks of the failure.
  void end() noexcept {
    if (thread_.joinable()) {
      decide(std::chrono::steady_clock::now());
      thread_.join();
    }
    if (rank_ != 0 || is_published_) return;
    if (!error_) publish();
    if (!is_published_) clear();
  }

  // After end() of rank 0: the error of this or another rank.
  std::exception_ptr outcome() const {
    if (error_ || rank_ == 0) return error_;
    try {
      if (!path_exists(temporary_) && owner_.directory_.latest() == step_) return nullptr;
      throw Error(concat("the checkpoint of step ", step_,
                         " was not saved: another rank says why; what was there before still is"));
    } catch (...) {
      return std::current_exception();
    }
  }

 private:
  void prepare(const CheckpointState& state, const TrainingPosition& position) {
    Engine& engine = EngineAccess::of(state.sharded);
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
    for (;;) {
      const bool is_complete = num_records() == manifest_.num_ranks();
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
      deadline_ = deadline;
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
    FSDP_CHECK(path_exists(path), "the checkpoint of step ", step_, " was not saved: rank ", rank,
               " has not written its part and says why; what was there before still is");
    const std::string text = read_text_file(path, kMaxRecordBytes);
    manifest_.files.push_back(
        {name, static_cast<int64_t>(text.size()), crc32c(std::as_bytes(std::span(text)))});
    const RankRecord record = parse_rank_record(text, path);
    for (const RankRecord::File& file : record.files)
      manifest_.files.push_back({file.path, file.bytes, crc32c_of(file, record.block_bytes)});
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

  void clear() const noexcept {
    try {
      for (const std::string& name : names_in(temporary_))
        remove_tree(concat(temporary_, "/", name));
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
      id_(make_id(mesh)) {}

Checkpointer::Impl::~Impl() {
  attempt_.reset();
  remove_leftover();
}

// Removed late, because other ranks look for it to learn of the failure.
void Checkpointer::Impl::remove_leftover() noexcept {
  try {
    if (!leftover_.empty()) remove_tree(std::exchange(leftover_, {}));
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, error.what());
  }
}

std::vector<SavedCheckpoint> Checkpointer::Impl::take_saved() {
  const std::lock_guard lock(saved_mutex_);
  return std::exchange(saved_, {});
}

int64_t Checkpointer::Impl::snapshot_bytes() const { return snapshot_ ? snapshot_->bytes() : 0; }

void Checkpointer::Impl::save(const CheckpointState& state, const TrainingPosition& position) {
  if (position.step < 0)
    throw UsageError(concat("position.step is ", position.step, "; steps count from 0"));
  const std::exception_ptr earlier = end_attempt();
  ++num_attempts_;
  attempt_ = std::make_unique<Attempt>(*this, state, position);
  if (options_.mode == SaveMode::kBlocking) {
    attempt_->write();
    wait();
  } else {
    if (!snapshot_)
      snapshot_ = std::make_unique<Snapshot>(EngineAccess::of(state.sharded).device());
    attempt_->copy_state(*snapshot_);
    attempt_->run_in_background();
  }
  if (earlier) std::rethrow_exception(earlier);
}

std::exception_ptr Checkpointer::Impl::end_attempt() {
  if (!attempt_) return nullptr;
  attempt_->wait_written();
  barrier(mesh_, "checkpoint written");
  remove_leftover();
  attempt_->end();
  barrier(mesh_, "checkpoint decided");
  const std::exception_ptr outcome = attempt_->outcome();
  if (outcome && rank_in(mesh_) == 0) leftover_ = attempt_->temporary();
  attempt_.reset();
  return outcome;
}

void Checkpointer::Impl::wait() {
  if (const std::exception_ptr error = end_attempt()) std::rethrow_exception(error);
}

std::optional<LoadedCheckpoint> Checkpointer::Impl::load_latest(const CheckpointState& state,
                                                                const LoadOptions& options) {
  wait();
  std::optional<int64_t> step;
  std::exception_ptr error;
  try {
    step = directory_.latest();
  } catch (...) {
    error = std::current_exception();
  }
  agree_on_success(mesh_, error, "looking for the latest checkpoint");
  // Another process may publish between the ranks' looks, so all load what rank 0 found.
  step = number_of_rank_0(mesh_, step.value_or(-1), "latest checkpoint");
  if (*step < 0) return std::nullopt;
  in_use_ = {*step};
  return load_checkpoint(directory_.path_of(*step), state, options);
}

// --- what users see ------------------------------------------------------------------------------

Checkpointer::Checkpointer(const std::string& directory, const Mesh& mesh,
                           const CheckpointerOptions& options)
    : impl_(std::make_unique<Impl>(directory, mesh, options)) {}
Checkpointer::~Checkpointer() = default;

void Checkpointer::save(const CheckpointState& state, const TrainingPosition& position) {
  impl_->save(state, position);
}
void Checkpointer::wait() { impl_->wait(); }
std::optional<LoadedCheckpoint> Checkpointer::load_latest(const CheckpointState& state,
                                                          const LoadOptions& options) {
  return impl_->load_latest(state, options);
}
std::vector<SavedCheckpoint> Checkpointer::take_saved() { return impl_->take_saved(); }
int64_t Checkpointer::snapshot_bytes() const { return impl_->snapshot_bytes(); }

void save_checkpoint(const std::string& directory, const CheckpointState& state,
                     const TrainingPosition& position, const CheckpointerOptions& options) {
  CheckpointerOptions blocking = options;
  blocking.mode = SaveMode::kBlocking;
  Checkpointer(directory, EngineAccess::of(state.sharded).mesh(), blocking).save(state, position);
}

}  // namespace fsdp
