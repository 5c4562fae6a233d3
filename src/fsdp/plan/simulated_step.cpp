#include "fsdp/plan/simulated_step.h"

#include <algorithm>
#include <array>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/shard/engine/schedule.h"

namespace fsdp {

namespace {

// The first step has no updates before it, and the second one may still catch up with it.
constexpr int kSteps = 4;

class StepClock {
 public:
  explicit StepClock(const StepTimes& times)
      : times_(times),
        plan_(GatherPlan::without_pool(times.order, std::vector<bool>(times.units.size(), true),
                                       static_cast<int32_t>(times.prefetch))),
        gathered_(times.units.size(), 0.0),
        updated_(times.units.size(), 0.0),
        is_fresh_(times.units.size(), false) {}

  SimulatedStep run() {
    for (int step = 0; step < kSteps; ++step) {
      const double begin = compute_;
      result_ = {};
      for (int64_t i = 0; i < times_.microbatches; ++i) pass(i + 1 == times_.microbatches);
      end_step();
      result_.us = compute_ - begin;
      for (StepSpan& span : result_.spans) {
        span.begin -= begin;
        span.end -= begin;
      }
    }
    return std::move(result_);
  }

 private:
  const UnitTimes& unit(int32_t index) const { return times_.units[static_cast<size_t>(index)]; }

  // Work of `us` on a row that is free from `free` on, which cannot begin before `ready`.
  void work(StepRow row, double SimulatedStep::*sum, double& free, double ready, double us,
            std::string label) {
    const double begin = std::max(free, ready);
    free = begin + us;
    if (us <= 0.0) return;
    result_.*sum += us;
    result_.spans.push_back({row, begin, free, std::move(label)});
  }

  void wait_until(double time, double SimulatedStep::*exposed) {
    if (time <= compute_) return;
    result_.*exposed += time - compute_;
    compute_ = time;
  }

  void pass(bool is_last) {
    const int32_t num_forward = plan_.num_forward();
    for (int32_t time = 0; time < plan_.num_times(); ++time) {
      const bool is_forward = time < num_forward;
      const auto& uses = is_forward ? times_.order.forward : times_.order.backward;
      use(uses[static_cast<size_t>(is_forward ? time : time - num_forward)], time, is_forward,
          is_last);
    }
  }

  void use(int32_t index, int32_t time, bool is_forward, bool is_last) {
    const UnitTimes& u = unit(index);
    for (const GatherPlan::Gather& gather : plan_.gathers_at(time)) start_gather(gather.unit);
    host_ += is_forward ? u.host_forward : u.host_backward;
    wait_until(host_, &SimulatedStep::exposed_host);
    const size_t i = static_cast<size_t>(index);
    wait_until(updated_[i], &SimulatedStep::exposed_update);
    wait_until(gathered_[i], &SimulatedStep::exposed_gather);
    work(StepRow::kCompute, &SimulatedStep::compute, compute_, compute_,
         is_forward ? u.forward : u.backward,
         concat(u.name, is_forward ? " forward" : " backward"));
    work(StepRow::kExchange, &SimulatedStep::exchange, compute_, compute_,
         is_forward ? u.exchange_forward : u.exchange_backward, u.name);
    if (!is_forward) start_reductions(u, is_last);
  }

  // It waits for what the computing stream had queued when it was called.
  void start_gather(int32_t index) {
    const size_t i = static_cast<size_t>(index);
    const bool is_fresh = is_fresh_[i];
    is_fresh_[i] = false;
    const double us = unit(index).gather + (is_fresh ? unit(index).refresh : 0.0);
    work(StepRow::kGather, &SimulatedStep::gather, gather_,
         us > 0.0 ? std::max({compute_, host_, updated_[i]}) : 0.0, us, unit(index).name);
    if (us > 0.0) gathered_[i] = gather_;
  }

  // The engine waits for the reduction before this one, whose memory it releases.
  void start_reductions(const UnitTimes& u, bool is_last) {
    const double before = reduce_before_;
    if (u.reduce > 0.0) {
      work(StepRow::kReduce, &SimulatedStep::reduce, reduce_, compute_, u.reduce, u.name);
      reduce_before_ = reduce_;
    }
    if (is_last && u.reduce_at_end > 0.0)
      work(StepRow::kReduce, &SimulatedStep::reduce, reduce_, compute_, u.reduce_at_end,
           concat(u.name, " at the end"));
    if (is_last && u.reduce_over_outer > 0.0)
      work(StepRow::kReduce, &SimulatedStep::reduce, reduce_, compute_, u.reduce_over_outer,
           concat(u.name, " over the outer axis"));
    wait_until(before, &SimulatedStep::exposed_reduce);
  }

  void end_step() {
    wait_until(reduce_, &SimulatedStep::exposed_reduce);
    work(StepRow::kUpdate, &SimulatedStep::update, compute_, compute_, times_.between,
         "norm and beginning");
    result_.exposed_update += times_.between;
    // A run looks at every step's loss and norm before it asks for the next one.
    host_ = std::max(host_ + times_.host_update, compute_);
    double beside = std::max(compute_, lane_);
    for (size_t i = 0; i < times_.units.size(); ++i) {
      const UnitTimes& u = times_.units[i];
      double& lane = times_.updates_beside ? beside : compute_;
      work(StepRow::kUpdate, &SimulatedStep::update, lane, lane, u.update, u.name);
      if (!times_.updates_beside) result_.exposed_update += u.update;
      updated_[i] = lane;
      work(StepRow::kUpdate, &SimulatedStep::update, on_host_, compute_, u.offload,
           concat(u.name, " on the host"));
      if (u.offload > 0.0) updated_[i] = std::max(updated_[i], on_host_);
      is_fresh_[i] = true;
    }
    lane_ = beside;
  }

  const StepTimes& times_;
  const GatherPlan plan_;
  SimulatedStep result_;
  // Until when each of them is busy.
  double host_ = 0;
  double compute_ = 0;
  double gather_ = 0;
  double reduce_ = 0;
  double lane_ = 0;     // of updates beside computing
  double on_host_ = 0;  // of updates of what is offloaded
  double reduce_before_ = 0;
  std::vector<double> gathered_;  // by unit: when its weights are whole
  std::vector<double> updated_;
  std::vector<bool> is_fresh_;  // its weights were updated, and not gathered since
};

}  // namespace

const char* name_of(StepRow row) {
  switch (row) {
    case StepRow::kCompute:
      return "compute";
    case StepRow::kExchange:
      return "exchange";
    case StepRow::kGather:
      return "gather";
    case StepRow::kReduce:
      return "reduce";
    case StepRow::kUpdate:
      return "update";
  }
  FSDP_ASSERT(false, "no such row");
}

SimulatedStep simulate(const StepTimes& times) { return StepClock(times).run(); }

}  // namespace fsdp
