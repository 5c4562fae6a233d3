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

// Returns rank 0's number on all ranks.
int64_t number_of_rank_0(const Mesh& mesh, int64_t mine, const std::string& tag);

// Throws `mine` if it is set, and an Error on all other ranks if any rank has one.
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
