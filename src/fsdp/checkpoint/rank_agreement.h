// Ranks that save or load together: all come this far, and all know if one could not.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "fsdp/comm/mesh.h"

namespace fsdp {

// In the order in which ranks/NNNNN.json count.
int64_t rank_in(const Mesh& mesh);

// Done when every rank of the mesh has come this far: one barrier along each axis.
void barrier(const Mesh& mesh, const std::string& tag);

// The same number on all ranks: that of rank 0.
int64_t number_of_rank_0(const Mesh& mesh, int64_t mine, const std::string& tag);

// Throws `mine` where it is set, and an Error on all other ranks if any rank has one.
void agree_on_success(const Mesh& mesh, const std::exception_ptr& mine, const std::string& doing);

}  // namespace fsdp
