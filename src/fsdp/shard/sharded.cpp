#include "fsdp/shard/sharded.h"

#include <ATen/ATen.h>

#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/shard/engine/engine.h"

namespace fsdp {

namespace {

ShardedUnit& unit_named(const Engine& engine, const std::string& name) {
  std::vector<std::string> names;
  for (const auto& unit : engine.units()) {
    if (unit->name() == name) return *unit;
    names.push_back(unit->name());
  }
  const std::string guess = nearest(name, names);
  throw UsageError(concat("unit '", name, "' does not exist",
                          guess.empty() ? "" : concat("; did you mean '", guess, "'?")));
}

std::vector<ShardedUnit*> units_named(const Engine& engine, const std::vector<std::string>& names) {
  std::vector<ShardedUnit*> units;
  for (const std::string& name : names) units.push_back(&unit_named(engine, name));
  return units;
}

}  // namespace

std::string MemoryReport::text() const {
  const auto line = [](const char* what, int64_t bytes) {
    return concat(what, bytes_text(static_cast<double>(bytes)), "\n");
  };
  return concat(line("weights         ", weight_bytes), line("main weights    ", main_weight_bytes),
                line("main gradients  ", main_grad_bytes), line("pool            ", pool_bytes),
                line("reductions      ", reduction_bytes), line("moments         ", moment_bytes),
                workspace_bytes > 0 ? line("workspace       ", workspace_bytes) : "",
                line("total           ", total_bytes()), line("most so far     ", peak_bytes),
                line("on the host     ", host_bytes));
}

Engine& EngineAccess::of(const Sharded& sharded) { return *sharded.engine_; }

Sharded::NoSync::NoSync(std::shared_ptr<Engine> engine)
    : engine_(std::move(engine)), was_last_(engine_->gradients().is_last_microbatch()) {
  engine_->gradients().set_last_microbatch(false);
}

Sharded::NoSync::~NoSync() { engine_->gradients().set_last_microbatch(was_last_); }

void Sharded::microbatch(Microbatch microbatch) const {
  engine_->gradients().set_last_microbatch(microbatch.last);
}

int64_t Sharded::lane() const { return engine_->lane(); }
int64_t Sharded::micro_steps() const { return engine_->micro_steps(); }

void Sharded::wait_gradients() const { engine_->wait_gradients(); }
void Sharded::end_cycle() const { engine_->end_cycle("end_cycle()"); }
void Sharded::zero_grad() const { engine_->zero_grad(); }
bool Sharded::found_nonfinite() const { return engine_->found_nonfinite(); }
void Sharded::refresh_weights() const { engine_->refresh_weights(); }
void Sharded::reset() const { engine_->reset(); }
const ShardOptions& Sharded::options() const { return engine_->options(); }

Sharded::FullParameters::FullParameters(std::shared_ptr<Engine> engine, Access access,
                                        const std::vector<std::string>& units)
    : engine_(std::move(engine)), access_(access), units_(units_named(*engine_, units)) {
  if (units.empty())
    for (const auto& unit : engine_->units()) units_.push_back(unit.get());
  engine_->wait();
  engine_->weights().release();
  const bool writes = access_ == Access::kWrite;
  if (!writes)
    for (const ShardedUnit* unit : units_) engine_->weights().check_parameters(*unit);
  for (ShardedUnit* unit : units_) engine_->weights().pin(*unit, writes);
  for (ShardedUnit* unit : units_) unit->wait_gather();
}

Sharded::FullParameters::~FullParameters() {
  try {
    close();
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, "whole parameters could not be given up: ", error.what());
  }
}

void Sharded::FullParameters::close() {
  if (!std::exchange(is_open_, false)) return;
  const auto unpin = [&] {
    for (ShardedUnit* unit : units_) engine_->weights().unpin(*unit, access_ == Access::kWrite);
  };
  try {
    if (access_ == Access::kWrite)
      for (ShardedUnit* unit : units_) {
        FSDP_CHECK(engine_->weights().is_pinned(*unit), "unit '", unit->name(),
                   "' was sharded again by reset() while its parameters were written: what was "
                   "written is lost");
        for (ParamGroup& group : unit->groups()) group.take_over_values();
      }
  } catch (...) {
    unpin();
    throw;
  }
  unpin();
  for (ShardedUnit* unit : units_)
    if (engine_->calls().num_pending(*unit) == 0)  // a graph that waits for its backward has views
      for (ParamGroup& group : unit->groups()) group.give_views_nan();
}

void Sharded::unshard(const std::vector<std::string>& units) const {
  engine_->wait();
  const std::vector<ShardedUnit*> gathered = units_named(*engine_, units);
  for (ShardedUnit* unit : gathered) unit->start_gather(SlabFrom::kBeside);
  for (ShardedUnit* unit : gathered) unit->wait_gather();
}

void Sharded::reshard(const std::vector<std::string>& units) const {
  for (ShardedUnit* unit : units_named(*engine_, units)) engine_->weights().release(*unit);
}

void Sharded::drop_frozen_numbers() const {
  engine_->wait();
  for (const auto& unit : engine_->units())
    for (ParamGroup& group : unit->groups()) group.drop_frozen_numbers();
}

std::vector<ShardedParameter> Sharded::parameters() const {
  engine_->wait();
  engine_->gradients().expect_reader();
  std::vector<ShardedParameter> all;
  for (const auto& unit : engine_->units()) {
    for (const ParamGroup& group : unit->groups()) {
      for (size_t i = 0; i < group.members().size(); ++i) {
        const GroupMember& member = group.members()[i];
        const auto index = static_cast<int64_t>(i);
        all.push_back({.name = member.names.front(),
                       .aliases = {member.names.begin() + 1, member.names.end()},
                       .unit = unit->name(),
                       .shape = group.layout().request().shapes[i],
                       .is_trainable = group.is_trainable(),
                       .begin = group.held_of(index).begin,
                       .main_weight = group.main_weights().is_dropped()
                                          ? at::Tensor()
                                          : group.main_weights().at(group.held_flat(index)),
                       .gradient = group.gradient_of(index)});
      }
    }
  }
  return all;
}

std::vector<FlatShard> Sharded::flat_shards() const {
  engine_->wait();
  engine_->gradients().expect_reader();
  std::vector<FlatShard> all;
  for (const auto& unit : engine_->units())
    for (const ParamGroup& group : unit->groups()) {
      if (!group.is_trainable()) continue;
      if (!group.main_weights().has_views())
        throw UsageError(concat(
            "flat_shards() has no main weights of unit '", unit->name(),
            "' to change in place: they are split into the weights and a remainder, or offloaded; "
            "use an optimizer of this library, or set precision.main_storage = ",
            "MainStorage::kSeparate and offload.fraction = 0"));
      for (const MainWeightPiece& piece : group.main_weights().pieces()) {
        const FlatBuffer& gradient = group.gradient().main();
        all.push_back({unit->name(), piece.main.defined() ? piece.main : piece.weight,
                       gradient.is_allocated() ? gradient.at(piece.flat) : at::Tensor()});
      }
    }
  return all;
}

std::vector<std::string> Sharded::unit_names() const {
  std::vector<std::string> names;
  for (const auto& unit : engine_->units()) names.push_back(unit->name());
  return names;
}

std::vector<std::string> Sharded::unit_order() const {
  std::vector<std::string> names;
  const StepOrder& order = engine_->weights().order();
  for (const auto* part : {&order.forward, &order.backward})
    for (const int32_t unit : *part)
      names.push_back(engine_->units()[static_cast<size_t>(unit)]->name());
  return names;
}

MemoryReport Sharded::memory() const {
  const MemoryLedger& ledger = engine_->memory().ledger();
  return {.weight_bytes = ledger.bytes(MemoryKind::kWeight),
          .main_weight_bytes = ledger.bytes(MemoryKind::kMainWeight),
          .main_grad_bytes = ledger.bytes(MemoryKind::kMainGrad),
          .pool_bytes = ledger.bytes(MemoryKind::kPool),
          .reduction_bytes = ledger.bytes(MemoryKind::kReduction),
          .moment_bytes = ledger.bytes(MemoryKind::kMoment),
          .workspace_bytes = ledger.bytes(MemoryKind::kWorkspace),
          .peak_bytes = ledger.total_peak_bytes(),
          .host_bytes = engine_->memory().host_ledger().total_bytes()};
}

at::Tensor Sharded::take_cast_counts() const {
  wait_updates(engine_->units());
  at::Tensor counts = at::zeros({3}, at::device(engine_->device()).dtype(at::kDouble));
  for (const auto& unit : engine_->units())
    for (ParamGroup& group : unit->groups())
      if (QuantizedWeights* quantized = group.quantized()) counts.add_(quantized->take_counts());
  return counts;
}

void Sharded::set_precision(const PrecisionPolicy& precision) const {
  ShardOptions wanted = engine_->options();
  const PrecisionPolicy& now = wanted.precision;
  const auto refuse = [](const char* field) {
    throw UsageError(concat("precision.", field,
                            " cannot change after fully_shard(), because the buffer of that type "
                            "is there already; shard the model again with the new type"));
  };
  if (precision.params != now.params) refuse("params");
  if (precision.main_params != now.main_params) refuse("main_params");
  if (precision.main_storage != now.main_storage) refuse("main_storage");
  if (precision.main_grads != now.main_grads) refuse("main_grads");
  wanted.precision = precision;
  wanted.validate();
  engine_->set_grad_comm(precision.grad_comm);
}

void Sharded::set_prefetch(const std::string& unit, const std::vector<std::string>& ahead,
                           PrefetchIn phase) const {
  engine_->weights().set_ahead(unit_named(*engine_, unit),
                               phase == PrefetchIn::kForward ? Phase::kForward : Phase::kBackward,
                               units_named(*engine_, ahead));
}

}  // namespace fsdp
