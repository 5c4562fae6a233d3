// The model that benchmarks train: a small Llama whose embedding, blocks and head are units.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "fsdp/nn/layers/linear.h"
#include "fsdp/shard/unit.h"

namespace bench {

// 7.1 million parameters.
struct LlamaShape {
  int64_t hidden = 256;
  int64_t layers = 8;
  int64_t heads = 4;
  int64_t ffn = 768;
  int64_t vocab = 512;
  int64_t sequence = 128;
  int64_t batch = 4;
};

struct RmsNormImpl : torch::nn::Module {
  explicit RmsNormImpl(int64_t size) : weight(register_parameter("weight", at::ones({size}))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x * (x.square().mean(-1, true) + 1e-5).rsqrt() * weight;
  }
  at::Tensor weight;
};
TORCH_MODULE(RmsNorm);

// Rotates pairs of channels by an angle that grows with the position.
struct Rotation {
  Rotation(int64_t sequence, int64_t head_size) {
    const at::Tensor channel = at::arange(0, head_size, 2, at::kFloat) / head_size;
    const at::Tensor angle =
        at::outer(at::arange(sequence, at::kFloat), at::exp(channel * -std::log(10000.0)));
    cosine = at::cat({angle.cos(), angle.cos()}, -1);
    sine = at::cat({angle.sin(), angle.sin()}, -1);
  }
  at::Tensor operator()(const at::Tensor& x) {  // [batch, heads, sequence, head_size]
    if (cosine.device() != x.device()) {
      cosine = cosine.to(x.device());
      sine = sine.to(x.device());
    }
    const std::vector<at::Tensor> halves = x.chunk(2, -1);
    return x * cosine + at::cat({-halves[1], halves[0]}, -1) * sine;
  }
  at::Tensor cosine;
  at::Tensor sine;
};

struct LlamaBlockImpl : torch::nn::Module {
  explicit LlamaBlockImpl(const LlamaShape& shape)
      : heads(shape.heads),
        rotate(shape.sequence, shape.hidden / shape.heads),
        attention_norm(register_module("attention_norm", RmsNorm(shape.hidden))),
        query(register_module("query", linear(shape.hidden, shape.hidden))),
        key(register_module("key", linear(shape.hidden, shape.hidden))),
        value(register_module("value", linear(shape.hidden, shape.hidden))),
        output(register_module("output", linear(shape.hidden, shape.hidden))),
        ffn_norm(register_module("ffn_norm", RmsNorm(shape.hidden))),
        gate(register_module("gate", linear(shape.hidden, shape.ffn))),
        up(register_module("up", linear(shape.hidden, shape.ffn))),
        down(register_module("down", linear(shape.ffn, shape.hidden))) {}

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor middle = x + attend(attention_norm(x));
    const at::Tensor normed = ffn_norm(middle);
    return middle + down(at::silu(gate(normed)) * up(normed));
  }

  at::Tensor attend(const at::Tensor& x) {
    const auto split = [&](const at::Tensor& y) {
      return y.view({y.size(0), y.size(1), heads, -1}).transpose(1, 2);
    };
    const at::Tensor mixed = at::scaled_dot_product_attention(
        rotate(split(query(x))), rotate(split(key(x))), split(value(x)), {}, 0.0, true);
    return output(mixed.transpose(1, 2).reshape(x.sizes()));
  }

  static fsdp::nn::Linear linear(int64_t in, int64_t out) {
    return fsdp::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
  }

  const int64_t heads;
  Rotation rotate;
  RmsNorm attention_norm;
  fsdp::nn::Linear query, key, value, output;
  RmsNorm ffn_norm;
  fsdp::nn::Linear gate, up, down;
};
TORCH_MODULE(LlamaBlock);

struct LlamaHeadImpl : torch::nn::Module {
  explicit LlamaHeadImpl(const LlamaShape& shape)
      : norm(register_module("norm", RmsNorm(shape.hidden))),
        linear(register_module("linear", LlamaBlockImpl::linear(shape.hidden, shape.vocab))) {}
  at::Tensor forward(const at::Tensor& x) { return linear(norm(x)); }
  RmsNorm norm;
  fsdp::nn::Linear linear;
};
TORCH_MODULE(LlamaHead);

struct LlamaImpl : torch::nn::Module {
  explicit LlamaImpl(const LlamaShape& shape)
      : embedding(register_module("embedding",
                                  fsdp::Unit<torch::nn::Embedding>(
                                      torch::nn::EmbeddingOptions(shape.vocab, shape.hidden)))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        head(register_module("head", fsdp::Unit<LlamaHead>(shape))) {
    for (int64_t i = 0; i < shape.layers; ++i) {
      layers.emplace_back(shape);
      blocks->push_back(layers.back());
    }
  }

  // Mean cross entropy of the next tokens.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& next) {
    at::Tensor x = embedding(tokens);
    for (fsdp::Unit<LlamaBlock>& layer : layers) x = layer(x);
    return at::cross_entropy_loss(head(x).flatten(0, 1), next.flatten());
  }

  fsdp::Unit<torch::nn::Embedding> embedding;
  torch::nn::ModuleList blocks;
  fsdp::Unit<LlamaHead> head;
  std::vector<fsdp::Unit<LlamaBlock>> layers;
};
TORCH_MODULE(Llama);

}  // namespace bench
