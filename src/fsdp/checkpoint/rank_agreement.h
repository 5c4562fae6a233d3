// Agreement of ranks that save or load together: all arrive, and all learn of a failure.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "fsdp/comm/mesh.h"

namespace fsdp {

// The rank's number in the names ranks/NNNNN.json.
int64_t rank_in(const Mesh& mesh);

// Returns when every rank of the mesh has called it: one barrier along each axis.
void barrier(const Mesh& mesh, const std::string& tag);

// Whether the communicators are gone for good; never waits for a rank.
bool a_rank_has_failed(const Mesh& mesh);

// Returns rank 0's number on all ranks.
int64_t number_of_rank_0(const Mesh& mesh, int64_t mine, const std::string& tag);

// 16 hexadecimal digits that rank 0 draws.
std::string drawn_id(const Mesh& mesh, const std::string& tag);

// The first line of an error's message.
std::string words_of(const std::exception_ptr& error);

// Throws `mine` if it is set, and a RemoteError with the words of a rank that has failed on all
// others. If `mine` is itself a RemoteError, another rank's own error replaces it.
void agree_on_success(const Mesh& mesh, const std::exception_ptr& mine, const std::string& doing);

// Runs `body` on this rank; if it throws on one, all ranks throw.
template <typename Body>
void on_all_ranks(const Mesh& mesh, const std::string& doing, const Body& body) {
  std::exception_ptr error;
  try {
    body();
  } catch (...) {
    error = std::current_exception();
  }
  agree_on_success(mesh, error, doing);
}

}  // namespace fsdp
