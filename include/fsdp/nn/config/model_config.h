// The numbers that describe a model: one struct per architecture that can be planned and trained.
//
// Fields are named after the keys of the configurations published with the models.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace fsdp {

// A larger dimension is a typing error. Products of two dimensions fit 64 bits with room to add;
// ModelShape::validate checks whole shapes.
inline constexpr int64_t kMaxDim = int64_t{1} << 24;
// More layers, or more experts in all layers, are typing errors, too: no model comes near, and
// planning one would take minutes.
inline constexpr int64_t kMaxLayers = 4096;
inline constexpr int64_t kMaxExperts = int64_t{1} << 17;

// --- architectures -------------------------------------------------------------------------------

// Llama 3.1's extension to more positions: slows down slow rotations further, by wavelength.
struct Llama3RopeScaling {
  double factor = 8.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_max_position_embeddings = 8192;

  friend bool operator==(const Llama3RopeScaling&, const Llama3RopeScaling&) = default;
};

// Extension to more positions by turns: channels that turn often stay, slow ones are slowed down
// further, and cosines and sines get a factor.
struct YarnRopeScaling {
  double factor = 1.0;
  int64_t original_max_position_embeddings = 4096;
  double beta_fast = 32.0;  // channels with more turns in the original positions stay
  double beta_slow = 1.0;   // those with fewer are slowed down by the factor
  double mscale = 0.0;      // 0: not given, as below
  double mscale_all_dim = 0.0;
  double attention_factor = 0.0;  // of cosines and sines; 0: the one that follows from the others

  friend bool operator==(const YarnRopeScaling&, const YarnRopeScaling&) = default;
};

using RopeScaling = std::variant<std::monostate, Llama3RopeScaling, YarnRopeScaling>;

// Families with Llama's layers but for a detail.
enum class LlamaFamily : uint8_t {
  kLlama,    // with qk_norm: Qwen 3
  kMistral,  // a sliding window, or none
  kQwen2,    // biases of queries, keys and values alone
};

// Attention with grouped keys and values, then a gated MLP (Llama 1 to 3, Mistral, Qwen 2 and 3).
struct LlamaConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;  // 0: hidden_size / num_attention_heads
  int64_t intermediate_size = 0;
  bool attention_bias = false;
  bool mlp_bias = false;
  bool tie_word_embeddings = false;
  bool qk_norm = false;  // a norm for each query and key head, as Qwen 3 has
  LlamaFamily family = LlamaFamily::kLlama;
  int64_t sliding_window = 0;  // each position sees so many, itself included; 0: all before it
  double rms_norm_eps = 1e-5;
  double rope_theta = 10000.0;
  RopeScaling rope_scaling = {};
  int64_t max_position_embeddings = 2048;
  double initializer_range = 0.02;
  // Multi-token prediction: this many blocks after the main ones, each for one more token.
  int64_t num_nextn_predict_layers = 0;
  double mtp_loss_weight = 0.3;  // of the mean of their losses
  // The part of the published configuration that is not computed here, in a sentence; "": none.
  std::string not_computed = {};

  friend bool operator==(const LlamaConfig&, const LlamaConfig&) = default;
};

// Llama's attention; the MLP is a router and several gated experts (Mixtral; with qk_norm,
// Qwen3-MoE).
struct MixtralConfig {
  LlamaConfig decoder;  // its intermediate_size is of each expert
  int64_t num_local_experts = 0;
  int64_t num_experts_per_tok = 2;
  double router_aux_loss_coef = 0.001;
  // A gated MLP that every token passes beside its experts; 0: none.
  int64_t shared_expert_intermediate_size = 0;
  bool norm_topk_prob = true;  // the weights of a token's experts add up to 1

  friend bool operator==(const MixtralConfig&, const MixtralConfig&) = default;
};

// One mixer per layer, chosen by a pattern: M = Mamba-2, - = MLP, * = attention, E = experts.
struct NemotronHConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  std::string hybrid_override_pattern;
  int64_t mamba_num_heads = 0;
  int64_t mamba_head_dim = 0;
  int64_t n_groups = 0;
  int64_t ssm_state_size = 0;
  int64_t conv_kernel = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;  // 0: hidden_size / num_attention_heads
  bool use_conv_bias = true;
  bool use_bias = false;  // of the Mamba projections
  bool attention_bias = false;
  bool mlp_bias = false;
  bool tie_word_embeddings = false;
  double layer_norm_epsilon = 1e-5;
  int64_t chunk_size = 128;      // positions per chunk of the selective scan
  double time_step_min = 0.001;  // lower limit of steps
  int64_t max_position_embeddings = 4096;
  double initializer_range = 0.02;
  // Layers with experts, which have no gates, and a shared one.
  int64_t n_routed_experts = 0;
  int64_t num_experts_per_tok = 2;
  int64_t moe_intermediate_size = 0;                // of each expert
  int64_t moe_shared_expert_intermediate_size = 0;  // 0: none
  int64_t moe_latent_size = 0;  // of tokens on their way to the experts; 0: hidden_size
  // DeepSeek-V3's router: sigmoids, groups of which some are open, and biases that even out loads.
  int64_t n_group = 1;
  int64_t topk_group = 1;
  bool norm_topk_prob = true;
  double routed_scaling_factor = 1.0;
  double router_bias_update_rate = 0.001;  // the step of a bias; 0: they stay
  double router_aux_loss_coef = 0.0;       // of the load-balancing loss
  // Multi-token prediction: this many times the layers of a pattern, each for one more token.
  int64_t num_nextn_predict_layers = 0;
  std::string mtp_hybrid_override_pattern = "*E";
  double mtp_loss_weight = 0.3;   // of the mean of their losses
  std::string not_computed = {};  // as above

  friend bool operator==(const NemotronHConfig&, const NemotronHConfig&) = default;
};

enum class LayerType : uint8_t { kLinearAttention, kFullAttention };

// Gated DeltaNet in most layers and gated attention in the others; experts and a gated shared one,
// or a dense MLP (Qwen3-Next). Norms store the difference of their factors from 1.
struct Qwen3NextConfig {
  // Its intermediate_size is of layers without experts; heads are normed whatever qk_norm says.
  LlamaConfig decoder;
  double partial_rotary_factor = 0.25;  // of each head's channels, the first ones, have positions
  std::vector<LayerType> layer_types = {};  // empty: every fourth one is attention
  int64_t linear_num_key_heads = 16;
  int64_t linear_num_value_heads = 32;
  int64_t linear_key_head_dim = 128;
  int64_t linear_value_head_dim = 128;
  int64_t linear_conv_kernel_dim = 4;
  int64_t num_experts = 512;
  int64_t num_experts_per_tok = 10;
  int64_t moe_intermediate_size = 512;
  int64_t shared_expert_intermediate_size = 512;
  bool norm_topk_prob = true;
  double router_aux_loss_coef = 0.001;
  // Every so many layers one has experts, unless the list has it.
  int64_t decoder_sparse_step = 1;
  std::vector<int64_t> mlp_only_layers = {};

  friend bool operator==(const Qwen3NextConfig&, const Qwen3NextConfig&) = default;
};

// Latent attention, whose keys and values are made of a short vector per token; a few dense layers,
// then experts and shared ones under a router that evens out its load (DeepSeek-V3).
struct DeepseekV3Config {
  // Its head_dim is qk_rope_head_dim, the channels with positions; its intermediate_size is of the
  // dense layers; num_key_value_heads is num_attention_heads.
  LlamaConfig decoder;
  int64_t q_lora_rank = 0;  // 0: queries are projected in one step
  int64_t kv_lora_rank = 512;
  int64_t qk_nope_head_dim = 128;
  int64_t v_head_dim = 128;
  bool rope_interleave = true;  // channels that turn together are neighbours
  int64_t first_k_dense_replace = 3;
  int64_t n_routed_experts = 256;
  int64_t n_shared_experts = 1;  // each of moe_intermediate_size
  int64_t num_experts_per_tok = 8;
  int64_t moe_intermediate_size = 2048;
  // The router's, like NemotronHConfig's.
  int64_t n_group = 8;
  int64_t topk_group = 4;
  bool norm_topk_prob = true;
  double routed_scaling_factor = 2.5;
  double router_bias_update_rate = 0.001;
  double router_aux_loss_coef = 0.0;

  friend bool operator==(const DeepseekV3Config&, const DeepseekV3Config&) = default;
};

using ModelConfig =
    std::variant<LlamaConfig, MixtralConfig, NemotronHConfig, Qwen3NextConfig, DeepseekV3Config>;

// head_dim, or its default if it is 0.
int64_t head_dim_of(const LlamaConfig& config);
int64_t head_dim_of(const NemotronHConfig& config);

// Whether queries, keys and values have biases.
bool has_qkv_bias(const LlamaConfig& config);

// Whether a layer of this kind is among the main ones or among those that predict more tokens.
bool has_layer(const NemotronHConfig& config, char kind);

LayerType layer_type_of(const Qwen3NextConfig& config, int64_t layer);
bool has_experts(const Qwen3NextConfig& config, int64_t layer);
// The channels of a head that have positions.
int64_t rotary_dim_of(const Qwen3NextConfig& config);

// Holds for layers that predict more tokens, too: their numbers follow those of the main ones.
bool has_experts(const DeepseekV3Config& config, int64_t layer);
// The channels of a query, with and without positions.
int64_t query_head_dim_of(const DeepseekV3Config& config);

// The experts of one layer, and how published checkpoints name them.
struct ExpertNames {
  std::string module;                    // their parent: "mlp.experts"
  std::vector<std::string> projections;  // gate, up and down; or up and down
  int64_t num_experts = 0;
  int64_t hidden_size = 0;  // of their tokens
  int64_t intermediate_size = 0;
};
// nullopt: the model has no experts.
std::optional<ExpertNames> expert_names(const ModelConfig& config);
// The module of a layer that has the router and the experts: "mlp".
std::string experts_module(const MixtralConfig& config);

// A tensor that holds matrices of all experts, one below the other, and the names under which
// published checkpoints have them, in that order.
struct StackedExperts {
  std::string name;
  std::vector<int64_t> shape;
  int64_t num_experts = 0;
  std::vector<std::string> parts;  // equal parts along the first dimension
};

// Gate and up projection of expert after expert, or up alone; and the down projections.
std::array<StackedExperts, 2> stacked_experts(const ExpertNames& names);

// Checks that the tensors have shapes. UsageError with the field, its value and its rule.
void validate(const ModelConfig& config);

// Checks that the model can be computed, too. UsageError, as above.
void check_trainable(const ModelConfig& config);

// Checks that `tp` ranks can compute the model together. UsageError that names the field.
void check_tensor_ranks(const ModelConfig& config, int64_t tp);

int64_t vocab_size_of(const ModelConfig& config);
int64_t max_positions_of(const ModelConfig& config);

}  // namespace fsdp
