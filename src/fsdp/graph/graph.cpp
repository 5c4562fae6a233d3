#include "fsdp/graph/graph.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/device_stream.h"
#include "fsdp/base/log.h"
#include "fsdp/comm/backends.h"
#include "fsdp/graph/device_graph.h"
#include "fsdp/optim/optimizer_impl.h"
#include "fsdp/optim/task_queue.h"
#include "fsdp/shard/engine/engine_views.h"
#include "fsdp/shard/engine/gradients.h"
#include "fsdp/shard/engine/weights.h"

namespace fsdp {

namespace {

// A step whose order of units never comes to rest is not the same step every time.
constexpr int64_t kMaxExtraWarmup = 4;

[[noreturn]] void refuse(const std::string& what, const char* fix) {
  throw UsageError(concat("a graph cannot record ", what, "; ", fix));
}

std::vector<const MeshAxis*> axes_that_talk(const EngineView& engine) {
  std::vector<const MeshAxis*> axes;
  const Mesh& mesh = engine.mesh();
  for (const GridKind kind : mesh.grids()) {
    const Grid grid = mesh.grid(kind);
    for (const MeshAxis* axis : {grid.inner, grid.outer, grid.owners})
      if (axis != nullptr && axis->size() > 1 &&
          std::find(axes.begin(), axes.end(), axis) == axes.end())
        axes.push_back(axis);
  }
  return axes;
}

void check_options(const RecordingView& engine) {
  const ShardOptions& options = engine.options();
  if (options.pool == PoolKind::kOnDemand && engine.weights().pool() != nullptr)
    refuse("steps with pool on_demand, whose addresses change",
           "use pool max_pool, planned or double_buffer");
  if (options.offload.fraction > 0.0)
    refuse(concat("steps with offload.fraction ", options.offload.fraction,
                  ", whose updates are the host's work"),
           "set it to 0, or run the steps without a graph");
  if (options.report_nan != ReportNan::kOff)
    refuse("steps with report_nan per parameter, which wait for the device",
           "set it to off; found_nonfinite() after a step still says whether there was one");
  for (const MeshAxis* axis : axes_that_talk(engine))
    if (const std::string why = axis->gather().why_not_recorded(); !why.empty())
      refuse(concat("steps of ", axis->size(), " ranks, ", why),
             "use ranks that are processes with NCCL, or run the steps without a graph");
}

}  // namespace

void GraphOptions::validate() const {
  if (warmup < 2)
    throw UsageError(concat("graph.warmup is ", warmup,
                            "; use 2 or more: the first step learns the order of units, the second "
                            "one plans with it"));
}

// Functions without a comment here are those of Graph.
class Graph::Impl {
 public:
  Impl(const Sharded& sharded, Optimizer* optimizer, Body body, const GraphOptions& options);

  void run();
  bool is_recorded() const { return is_recorded_; }

 private:
  void replay();
  void record();
  void release_recording(const char* why);
  int64_t num_rule_changes() const {
    return optimizer_ == nullptr ? 0 : OptimizerAccess::of(*optimizer_).num_rule_changes();
  }
  // `rate` was the learning rate before.
  void check_recorded(double rate) const;
  void cancel_recording();
  void wait_for_all() const;

  const Sharded sharded_;
  const RecordingView engine_;
  Optimizer* const optimizer_;
  const Body body_;
  const GraphOptions options_;
  std::unique_ptr<DeviceGraph> device_graph_;
  const c10::Stream stream_;  // every step runs here, so that recorded and eager ones do alike
  int64_t num_eager_ = 0;
  bool is_recorded_ = false;
  int64_t recorded_plan_ = 0;          // the engine's plan_number() then
  int64_t recorded_rules_ = 0;         // the optimizer's num_rule_changes() then
  std::vector<GradientCycle> cycles_;  // of gradients the body leaves behind
};

Graph::Impl::Impl(const Sharded& sharded, Optimizer* optimizer, Body body,
                  const GraphOptions& options)
    : sharded_(sharded),
      engine_(sharded),
      optimizer_(optimizer),
      body_(std::move(body)),
      options_(options),
      device_graph_(make_device_graph(engine_.device())),
      stream_(new_stream(engine_.device())) {
  options_.validate();
  check_options(engine_);
  wait_for_all();
  const c10::StreamGuard guard(stream_);
  engine_.renew_gradient_hooks();
}

// Nothing that was begun outside a recording may be waited for inside it, nor the other way round.
void Graph::Impl::wait_for_all() const {
  if (optimizer_ != nullptr) OptimizerAccess::of(*optimizer_).wait_for_step();
  engine_.come_to_rest();
}

void Graph::Impl::run() {
  const c10::Stream caller = current_stream(stream_.device());
  follow(stream_, caller);
  {
    const c10::StreamGuard guard(stream_);
    wait_for_all();
    if (is_recorded_ && engine_.weights().plan_number() != recorded_plan_)
      release_recording("its memory was planned anew");
    if (is_recorded_ && num_rule_changes() != recorded_rules_)
      release_recording("the numbers of a rule of the optimizer have changed");
    if (optimizer_ != nullptr) OptimizerAccess::of(*optimizer_).tell_learning_rate();
    const bool is_warm = num_eager_ >= options_.warmup && engine_.weights().is_planned();
    if (!is_recorded_ && !is_warm) {
      FSDP_CHECK(num_eager_ < options_.warmup + kMaxExtraWarmup, "after ", num_eager_,
                 " steps the order of the model's units still changes, so no step can be recorded "
                 "for the next ones; run the steps without a graph");
      body_();
      ++num_eager_;
    } else {
      if (!is_recorded_) record();
      replay();
      engine_.gradients().set_cycles(cycles_);
      if (optimizer_ != nullptr) engine_.expect_newer_weights();
    }
    wait_for_all();
  }
  follow(caller, stream_);
}

// Only the device knows the collectives of a replay. So their communicators are told here that
// collectives are under way, and are asked whether the last ones failed.
void Graph::Impl::replay() {
  for (const MeshAxis* axis : axes_that_talk(engine_))
    for (Communicator* ranks : {&axis->gather(), &axis->reduce()}) ranks->throw_if_aborted();
  device_graph_->replay();
  for (const MeshAxis* axis : axes_that_talk(engine_))
    if (NcclCalls* nccl = axis->gather().nccl()) nccl->watch_replay(stream_);
}

void Graph::Impl::record() {
  FSDP_CHECK(!engine_.gradients().has_any(),
             "a graph is to be recorded while there are gradients of an earlier backward; end the "
             "body with zero_grad(), or call it before run()");
  const double rate = optimizer_ != nullptr ? optimizer_->learning_rate() : 0.0;
  // Weights may be fresh now, because of a validation; before later replays they will not be.
  engine_.expect_newer_weights();
  try {
    device_graph_->begin(options_.generators);
    engine_.gradients().missing().set_recording(true);
    body_();
    engine_.gradients().missing().set_recording(false);
    wait_for_all();
    check_recorded(rate);
    device_graph_->end();
  } catch (const Error&) {
    cancel_recording();
    throw;
  } catch (const std::exception& error) {  // of libtorch
    cancel_recording();
    throw Error(concat("this step cannot be recorded as a graph: ", error.what(),
                       " (what waits for the device inside the step cannot be replayed: item(), "
                       "copies to the host, shapes that depend on values)"));
  }
  cycles_ = engine_.gradients().cycles();
  recorded_plan_ = engine_.weights().plan_number();
  recorded_rules_ = num_rule_changes();
  is_recorded_ = true;
}

// After a plan the addresses in the recording belong to others, and rules are numbers in its
// kernels.
void Graph::Impl::release_recording(const char* why) {
  log(LogLevel::kInfo, "the recorded step is out of date, because ", why,
      "; it is recorded again after ", options_.warmup, " steps without a graph");
  device_graph_ = make_device_graph(stream_.device());
  is_recorded_ = false;
  num_eager_ = 0;
}

void Graph::Impl::check_recorded(double rate) const {
  FSDP_CHECK(!engine_.gradients().has_any() ||
                 engine_.options().gradient_lifetime == GradientLifetime::kPersistent,
             "the recorded step leaves gradients behind, whose memory would go with zero_grad(); "
             "set gradient_lifetime to persistent, or record the optimizer's step, too");
  FSDP_CHECK(optimizer_ == nullptr || optimizer_->learning_rate() == rate,
             "the recorded step sets the learning rate itself, so every replay would use the same; "
             "call set_learning_rate() outside of it");
}

// The device ran nothing of the recorded step, although the host has noted its gathers, reductions
// and updates as begun: all of them are cancelled.
void Graph::Impl::cancel_recording() {
  engine_.gradients().missing().set_recording(false);
  device_graph_->cancel();
  device_graph_ = make_device_graph(stream_.device());
  sharded_.reset();
  engine_.expect_newer_weights();  // gathers that were recorded brought nothing
  if (optimizer_ != nullptr) OptimizerAccess::of(*optimizer_).cancel_step();
}

Graph::Graph(const Sharded& sharded, Optimizer* optimizer, Body body, const GraphOptions& options)
    : impl_(std::make_unique<Impl>(sharded, optimizer, std::move(body), options)) {}
Graph::~Graph() = default;

void Graph::run() { impl_->run(); }
bool Graph::is_recorded() const { return impl_->is_recorded(); }

}  // namespace fsdp
