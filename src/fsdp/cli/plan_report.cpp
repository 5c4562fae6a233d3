#include "fsdp/cli/plan_report.h"

#include <algorithm>
#include <array>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>
#include <string_view>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/option_values.h"
#include "fsdp/base/text.h"
#include "fsdp/optim/kernels/update_span.h"

namespace fsdp::cli {

std::string fixed_text(double value, int digits) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(digits) << value;
  return out.str();
}

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kTrafficNote =
    "received by each rank in a step of one microbatch: (n-1)/n of a gathered or reduce-scattered "
    "buffer,\n  twice that of an all-reduced one";

std::string share_words(PlacementPair placed, MeshShape mesh) {
  const int64_t parts = num_shards(placed, mesh);
  return parts == 1 ? "whole" : concat("1/", parts);
}

std::string cut_words(Granularity granularity) {
  switch (granularity.kind) {
    case Granularity::Kind::kElement:
      return "cuts anywhere";
    case Granularity::Kind::kRow:
      return "cuts between rows";
    case Granularity::Kind::kBlock:
      return concat("cuts between blocks of ", granularity.block_numel);
    case Granularity::Kind::kTensor:
      return "tensors are never cut";
  }
  return "";
}

void print_header(std::ostream& out, const ModelShape& model, const Forecast& forecast) {
  const PlanOptions& options = forecast.options;
  const MeshShape mesh = options.mesh();
  out << "model     " << shown(model.name) << ": " << grouped_text(forecast.parameters)
      << " parameters in " << forecast.num_units << " units\n";
  out << "ranks     " << options.ranks;
  if (mesh.outer > 1) out << " = " << mesh.outer << " outer x " << mesh.inner << " inner";
  constexpr std::array<std::pair<GridKind, std::array<const char*, 2>>, 2> kOthers = {
      {{GridKind::kTensor, {"tensors", "tp"}}, {GridKind::kExpert, {"experts", "ep"}}}};
  for (const auto& [grid, names] : kOthers) {
    if (options.owners(grid) == 1) continue;
    const MeshShape other = options.mesh(grid);
    out << "; " << names[0] << " " << other.outer << " outer x " << other.inner << " inner x "
        << options.owners(grid) << " " << names[1];
  }
  out << "\npadding   " << fixed_text(100 * forecast.padding_fraction, 4) << " % of the weights ("
      << cut_words(options.granularity) << "; the best possible is "
      << fixed_text(100 * forecast.padding_bound_fraction, 4) << " %)\n";
}

std::string pool_words(const Forecast& forecast) {
  const PlanOptions& options = forecast.options;
  std::string words = concat(name_of(options.pool), ", prefetch ", forecast.prefetch);
  if (options.pool_budget_bytes)
    words += concat(", the deepest within ", bytes_text(*options.pool_budget_bytes));
  return words;
}

// A row of a table, and its key in JSON.
struct Row {
  const char* name;
  const char* key;
  int64_t bytes;
  std::string note = {};
  int64_t host_bytes = 0;
};

Json to_json(std::span<const Row> rows) {
  Json json;
  for (const Row& row : rows) json[row.key] = row.bytes;
  return json;
}

constexpr int kNameWidth = 18;
constexpr int kBytesWidth = 10;
constexpr std::string_view kWorkspace = "workspace";

// Shows the host's column only if something is in host memory.
void print_rows(std::ostream& out, const std::vector<Row>& rows) {
  const bool uses_host =
      std::any_of(rows.begin(), rows.end(), [](const Row& row) { return row.host_bytes > 0; });
  if (uses_host)
    out << std::setw(2 + kNameWidth + kBytesWidth) << "device" << std::setw(kBytesWidth) << "host"
        << "\n";
  for (const Row& row : rows) {
    // Only Muon has any.
    if (row.bytes == 0 && row.key == kWorkspace) continue;
    out << "  " << std::left << std::setw(kNameWidth) << row.name << std::right
        << std::setw(kBytesWidth) << bytes_text(row.bytes);
    if (uses_host)
      out << std::setw(kBytesWidth) << (row.host_bytes > 0 ? bytes_text(row.host_bytes) : "");
    if (!row.note.empty()) out << "   " << row.note;
    out << "\n";
  }
}

std::string main_weight_words(const GroupTypes& types, const PlanOptions& options) {
  if (!types.main_weight)
    return options.precision.main_params == types.weight ? "the weights themselves" : "none";
  const std::string share = share_words(options.strategy.optimizer, options.mesh());
  return types.split ? concat(name_of(*types.main_weight), " split: its lower half, ", share)
                     : concat(name_of(*types.main_weight), ", ", share);
}

std::string moment_words(DType dtype) {
  return concat(name_of(dtype), is_scaled(dtype) ? " with scales" : "");
}

std::string moments_words(const GroupTypes& types, const PlanOptions& options) {
  if (!types.first_moment) return "none";
  if (options.muon)
    return concat(moment_words(*types.first_moment), " of matrices, two of the rest, ",
                  share_words(options.strategy.optimizer, options.mesh()));
  const std::string first = moment_words(*types.first_moment);
  const std::string both = !types.second_moment ? first
                           : types.second_moment == types.first_moment
                               ? "2 x " + first
                               : first + " + " + moment_words(*types.second_moment);
  return concat(both, ", ", share_words(options.strategy.optimizer, options.mesh()));
}

std::vector<Row> memory_rows(const Forecast& forecast) {
  const PlanOptions& options = forecast.options;
  const MeshShape mesh = options.mesh();
  const MemoryBytes& bytes = forecast.bytes;
  const GroupTypes types =
      resolve_types(options.compute, options.precision, Trainable::kYes, options.weights);
  return {
      {"weights", "weight", bytes.weight,
       concat(types.is_quantized() ? concat(row_of(types.recipe).name, " and ") : std::string(),
              name_of(types.weight), ", ", share_words(options.strategy.parameter, mesh))},
      {"main weights", "main_weight", bytes.main_weight, main_weight_words(types, options),
       bytes.host.main_weight},
      {"main gradients", "main_grad", bytes.main_grad,
       concat(name_of(types.main_grad), ", ", share_words(options.strategy.gradient, mesh))},
      {"moments", "moments", bytes.moments, moments_words(types, options), bytes.host.moments},
      {"workspace", kWorkspace.data(), bytes.workspace,
       options.muon ? concat("Muon's products in ", name_of(*options.muon)) : ""},
      {"weight pool", "weight_pool", bytes.weight_pool,
       bytes.weight_pool > 0 ? pool_words(forecast) : ""},
      {"gradient pool", "grad_pool", bytes.grad_pool,
       bytes.grad_pool > 0 ? concat(name_of(types.wire), " on the wire") : ""},
      {"total", "total", bytes.total(), "", bytes.host.total()},
  };
}

// The busiest rank's share of the update of matrices, and the ranks without any.
std::string matrix_words(const Forecast& forecast) {
  const MatrixForecast& matrices = forecast.matrices;
  constexpr double kIterations = 5;  // MuonOptions' own
  return concat(matrices.num_matrices, " matrices with an owner each; the busiest rank multiplies ",
                fixed_text(kIterations * matrices.most_flops / 1e12, 2), " Tflop a step, ",
                fixed_text(matrices.most_flops / matrices.mean_flops, 2), " x the mean; ",
                matrices.num_idle_ranks, " of ", forecast.options.ranks, " ranks own none");
}

struct AxisName {
  const char* words;
  const char* key;  // in JSON
  AxisTraffic Traffic::*traffic;
};

constexpr std::array<AxisName, 5> kAxes = {
    {{"inner", "inner", &Traffic::inner},
     {"outer", "outer", &Traffic::outer},
     {"tensors' inner", "tensor_inner", &Traffic::tensor_inner},
     {"experts' inner", "expert_inner", &Traffic::expert_inner},
     {"experts' outer", "expert_outer", &Traffic::expert_outer}}};

// Its parts by axis, if not all goes over the inner one.
std::string axes_words(const Traffic& traffic, const auto& bytes_of) {
  std::vector<std::string> parts;
  for (size_t i = 1; i < kAxes.size(); ++i)
    if (const int64_t bytes = bytes_of(traffic.*kAxes[i].traffic); bytes > 0)
      parts.push_back(concat(bytes_text(bytes), " of it over the ", kAxes[i].words, " axis"));
  return join(parts, ", ");
}

struct Collective {
  const char* name;
  const char* key;  // in JSON
  int64_t (*bytes)(const AxisTraffic&);
};

constexpr std::array<Collective, 4> kCollectives = {
    {{"all-gather", "all_gather", [](const AxisTraffic& axis) { return axis.all_gather; }},
     {"reduce-scatter", "reduce_scatter",
      [](const AxisTraffic& axis) { return axis.reduce_scatter; }},
     {"all-reduce", "all_reduce", [](const AxisTraffic& axis) { return axis.all_reduce; }},
     {"total", "total", [](const AxisTraffic& axis) { return axis.total(); }}}};

std::vector<Row> traffic_rows(const Forecast& forecast) {
  const AxisTraffic sum = forecast.traffic.sum();
  std::vector<Row> rows;
  for (const Collective& each : kCollectives)
    rows.push_back(
        {each.name, each.key, each.bytes(sum), axes_words(forecast.traffic, each.bytes)});
  return rows;
}

// The sum, and each axis by itself.
Json traffic_json(const Forecast& forecast) {
  Json json = to_json(traffic_rows(forecast));
  for (const AxisName& axis : kAxes)
    for (const Collective& each : kCollectives)
      json[axis.key][each.key] = each.bytes(forecast.traffic.*axis.traffic);
  return json;
}

struct NetworkRow {
  const char* name;
  const char* key;
  int64_t NetworkForecast::Part::*bytes;
};

constexpr std::array<NetworkRow, 3> kNetworkRows = {
    {{"inside a host", "near_bytes", &NetworkForecast::Part::near_bytes},
     {"through a card", "far_bytes", &NetworkForecast::Part::far_bytes},
     {"by NCCL's rings", "ring_far_bytes", &NetworkForecast::Part::ring_far_bytes}}};

Json network_json(const NetworkForecast& network) {
  Json json = {{"hosts", network.hosts},
               {"sum_group", network.sum_group},
               {"collectives", network.collectives},
               {"launches", network.gathers.launches + network.reductions.launches},
               {"connections", network.connections},
               {"staging_bytes", network.staging_bytes},
               {"nccl_bytes", network.nccl_bytes}};
  for (const NetworkRow& row : kNetworkRows) {
    json["gathers"][row.key] = network.gathers.*row.bytes;
    json["reductions"][row.key] = network.reductions.*row.bytes;
  }
  return json;
}

void print_network(std::ostream& out, const NetworkForecast& network) {
  out << "\nnetwork, of them for each rank, with " << counted_text(network.hosts, "host")
      << "; sums in groups of " << network.sum_group << "\n"
      << std::setw(2 + kNameWidth + kBytesWidth) << "gathers" << std::setw(2 + kBytesWidth)
      << "reductions"
      << "\n";
  for (const NetworkRow& row : kNetworkRows)
    out << "  " << std::left << std::setw(kNameWidth) << row.name << std::right
        << std::setw(kBytesWidth) << bytes_text(network.gathers.*row.bytes)
        << std::setw(2 + kBytesWidth) << bytes_text(network.reductions.*row.bytes) << "\n";
  out << "  " << counted_text(network.collectives, "collective") << " in "
      << network.gathers.launches + network.reductions.launches << " launches; "
      << counted_text(network.connections, "connection") << "\n  NCCL's memory about "
      << bytes_text(network.nccl_bytes) << ", and " << bytes_text(network.staging_bytes)
      << " in which reductions receive\n";
}

const char* recompute_words(const PeakOptions& options) {
  return options.recomputes_blocks ? "block" : "none";
}

void print_forecast(std::ostream& out, const ModelShape& model, const Forecast& forecast) {
  const Strategy& strategy = forecast.options.strategy;
  print_header(out, model, forecast);
  out << "strategy  " << to_text(strategy) << ": parameter " << to_text(strategy.parameter)
      << ", gradient " << to_text(strategy.gradient) << ", optimizer "
      << to_text(strategy.optimizer) << " (outer, inner)\n";
  if (forecast.matrices.num_matrices > 0) out << "muon      " << matrix_words(forecast) << "\n";
  out << "\nmemory of each rank\n";
  print_rows(out, memory_rows(forecast));
  out << "\n" << kTrafficNote << "\n";
  print_rows(out, traffic_rows(forecast));
  if (forecast.network) print_network(out, *forecast.network);
  out << "\nplanned in " << fixed_text(forecast.plan_seconds, 3) << " s\n";
}

std::vector<Row> peak_rows(const PeakForecast& peak) {
  return {{"state", "state", peak.state, "weights, main weights, moments and pools"},
          {"main gradients", "gradients", peak.gradients, "those that have memory then"},
          {"activations", "activations", peak.activations, "kept for the backward"},
          {"working", "working", peak.working, "what is being computed"},
          {"workspaces", "workspaces", peak.workspaces, "of matrix products"},
          {"rounding", "rounding", peak.rounding, "of the allocator"},
          {"allocated", "allocated", peak.allocated(), "by libtorch"},
          {"CUDA context", "context", peak.context, "as measured on an H200"},
          {"total", "total", peak.total()}};
}

void print_peak(std::ostream& out, const RankPlan& plan) {
  const PeakOptions& options = *plan.batch;
  const PeakForecast& peak = *plan.peak;
  const BatchShape& batch = options.batch;
  out << "\nmost memory of a step on a GPU, " << batch.rows << " x " << batch.sequence << " tokens"
      << (options.recomputes_blocks ? ", blocks computed again" : "") << ": in " << peak.when
      << "\n";
  print_rows(out, peak_rows(peak));
  if (plan.recomputed_bytes)
    out << "with --recompute block " << bytes_text(*plan.recomputed_bytes)
        << ", for a third more arithmetic\n";
}

}  // namespace

Json to_json(const ModelShape& model, const Forecast& forecast) {
  const MemoryBytes& bytes = forecast.bytes;
  const PlanOptions& options = forecast.options;
  Json json = {
      {"model", model.name},
      {"strategy", to_text(options.strategy)},
      {"parameters", forecast.parameters},
      {"ranks", options.ranks},
      {"outer", options.outer},
      {"ep", options.ep},
      {"tp", options.tp},
      {"units", forecast.num_units},
      {"padding_fraction", forecast.padding_fraction},
      {"pool", name_of(options.pool)},
      {"prefetch", forecast.prefetch},
      {"offload", options.offload},
      {"weights", row_of(options.weights).name},
      {"compute", name_of(options.compute)},
      {"bytes", to_json(memory_rows(forecast))},
      {"host_bytes",
       {{"main_weight", bytes.host.main_weight},
        {"moments", bytes.host.moments},
        {"total", bytes.host.total()}}},
      {"traffic_bytes", traffic_json(forecast)},
      {"plan_seconds", forecast.plan_seconds},
  };
  if (forecast.network) json["network"] = network_json(*forecast.network);
  if (const MatrixForecast& matrices = forecast.matrices; matrices.num_matrices > 0)
    json["muon"] = {{"matrices", matrices.num_matrices},
                    {"mean_flops", matrices.mean_flops},
                    {"most_flops", matrices.most_flops},
                    {"idle_ranks", matrices.num_idle_ranks}};
  return json;
}

Json to_json(const ModelShape& model, const RankPlan& plan) {
  Json json = to_json(model, plan.forecast);
  if (!plan.peak) return json;
  json["recompute"] = recompute_words(*plan.batch);
  json["peak_bytes"] = {{"when", plan.peak->when}};
  json["peak_bytes"].update(to_json(peak_rows(*plan.peak)));
  if (plan.recomputed_bytes) json["recomputed_bytes"] = *plan.recomputed_bytes;
  return json;
}

void print_plan(std::ostream& out, const ModelShape& model, const RankPlan& plan) {
  print_forecast(out, model, plan.forecast);
  if (plan.peak) print_peak(out, plan);
}

void print_comparison(std::ostream& out, const ModelShape& model,
                      std::span<const Forecast> forecasts) {
  print_header(out, model, forecasts.front());
  out << "pool      " << name_of(forecasts.front().options.pool) << "\n\n";
  constexpr std::array<const char*, 11> kColumns = {"weights", "main wts", "main grds", "moments",
                                                    "wt pool", "grd pool", "total",     "on host",
                                                    "gather",  "red-scat", "all-red"};
  out << std::left << std::setw(26) << "strategy" << std::right;
  for (const char* column : kColumns) out << std::setw(10) << column;
  out << "\n";
  for (const Forecast& forecast : forecasts) {
    const MemoryBytes& bytes = forecast.bytes;
    const AxisTraffic moved = forecast.traffic.sum();
    out << std::left << std::setw(26) << to_text(forecast.options.strategy) << std::right;
    for (const int64_t value :
         {bytes.weight, bytes.main_weight, bytes.main_grad, bytes.moments, bytes.weight_pool,
          bytes.grad_pool, bytes.total(), bytes.host.total(), moved.all_gather,
          moved.reduce_scatter, moved.all_reduce})
      out << std::setw(10) << bytes_text(value);
    out << "\n";
  }
  out << "\nLast three columns: " << kTrafficNote << ".\n";
}

void print_fits(std::ostream& out, const ModelShape& model, int64_t budget_bytes,
                std::span<const RankPlan> plans) {
  const RankPlan& first = plans.front();
  out << "model     " << shown(model.name) << ": " << grouped_text(first.forecast.parameters)
      << " parameters in " << first.forecast.num_units << " units\n";
  out << "fits      " << bytes_text(budget_bytes) << " of each rank"
      << (first.peak ? "" : ", without activations (give --batch and --sequence)") << "\n\n";
  out << std::setw(7) << "ranks"
      << "  " << std::left << std::setw(26) << "strategy" << std::right << std::setw(10) << "batch"
      << std::setw(11) << "recompute" << std::setw(10) << "needs" << std::setw(10) << "on host"
      << std::setw(10) << "received"
      << "\n";
  for (const RankPlan& plan : plans) {
    const PlanOptions& options = plan.forecast.options;
    out << std::setw(7) << options.ranks << "  " << std::left << std::setw(26)
        << to_text(options.strategy) << std::right << std::setw(10)
        << (plan.batch ? concat(plan.batch->batch.rows, " x ", plan.batch->batch.sequence) : "")
        << std::setw(11) << (plan.batch ? recompute_words(*plan.batch) : "") << std::setw(10)
        << bytes_text(plan.bytes()) << std::setw(10) << bytes_text(plan.forecast.bytes.host.total())
        << std::setw(10) << bytes_text(plan.forecast.traffic.sum().total()) << "\n";
  }
  out << "\nLast column: " << kTrafficNote << ".\n";
}

}  // namespace fsdp::cli
