// Fields of a model's config.json that this project does not read stay in it.
#include "fsdp/train/model/published_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "fsdp/nn/config/config_json.h"

namespace fsdp::train::published_model_test {
namespace {

using Json = nlohmann::ordered_json;

Json llama() {
  return {{"bos_token_id", 1},
          {"model_type", "llama"},
          {"vocab_size", 64},
          {"hidden_size", 16},
          {"intermediate_size", 32},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 2},
          {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 5000.0}}},
          {"dtype", "bfloat16"},
          {"eos_token_id", {2, 3}},
          {"pad_token_id", nullptr},
          {"of_their_own", {{"a", 1}}}};
}

Json mixtral() {
  Json config = llama();
  config["model_type"] = "mixtral";
  config["num_key_value_heads"] = 2;
  config["num_local_experts"] = 4;
  config["output_router_logits"] = false;
  return config;
}

ModelConfig model_of(const Json& config) { return parse_model_config(config.dump(), "test"); }

TEST(PublishedConfig, StaysAsItWasWhereTheModelIsTheSame) {
  for (const Json& config : {llama(), mixtral()}) {
    const std::string text = config.dump(4);
    EXPECT_EQ(config_json_like(model_of(config), text), text);
  }
}

TEST(PublishedConfig, HasTheFieldsOfTheModelThatIsTrained) {
  for (const Json& config : {llama(), mixtral()}) {
    Json other = config;
    other["rms_norm_eps"] = 0.5;
    other["rope_parameters"]["rope_theta"] = 7000.0;
    const Json merged = Json::parse(config_json_like(model_of(other), config.dump()));
    EXPECT_EQ(config_json(model_of(merged)), config_json(model_of(other)));
    EXPECT_EQ(merged.at("rope_theta"), 7000.0);
    for (const char* field :
         {"bos_token_id", "eos_token_id", "pad_token_id", "dtype", "of_their_own"})
      EXPECT_EQ(merged.at(field), config.at(field)) << field;
    EXPECT_EQ(merged.value("output_router_logits", Json()),
              config.value("output_router_logits", Json()));
  }
}

TEST(PublishedConfig, OfAModelThatIsNotKnownHereIsNotKept) {
  const std::string mine = config_json(model_of(llama()));
  EXPECT_EQ(config_json_like(model_of(llama()), R"({"model_type": "mystery"})"), mine);
  EXPECT_EQ(config_json_like(model_of(llama()), "no JSON"), mine);
}

}  // namespace
}  // namespace fsdp::train::published_model_test
