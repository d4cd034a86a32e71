/* The packed file that lies beside an engine's extension, for extensions in C++.
 *
 * EXPORT_CHECKSUM: that of the packed file, which must be the one of this export. */
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "latbench.h"

namespace latbench {
namespace {  // each library has its own

using Model = std::shared_ptr<latbench_model>;

const char *const PACKED_FILE = "model.latbench", *const LEVEL = "LATBENCH_LEVEL";

std::string find_packed_file() {
    Dl_info own;
    if (!dladdr(reinterpret_cast<void *>(&find_packed_file), &own) || !own.dli_fname)
        throw std::runtime_error("the system does not say where this library lies");
    const std::string library = own.dli_fname;
    const size_t slash = library.rfind('/');
    return (slash == std::string::npos ? "" : library.substr(0, slash + 1)) + PACKED_FILE;
}

/* The checksum that the head of a packed file tells. */
uint64_t read_checksum(const std::string &path) {
    uint64_t head[4] = {};
    std::ifstream(path, std::ios::binary).read(reinterpret_cast<char *>(head), sizeof head);
    return head[3];
}

/* The packed file, which all layers of a process share while there is one. Its layers' parts are run by `share`. */
Model open_model(latbench_share share) {
    static std::mutex mutex;
    static std::map<std::string, std::weak_ptr<latbench_model>> opened;
    const char *named = std::getenv(LEVEL);
    const std::string level = named ? named : "";
    const std::lock_guard<std::mutex> lock(mutex);
    if (Model known = opened[level].lock()) return known;
    latbench_error error;
    const std::string path = find_packed_file();
    latbench_model *found = latbench_open(path.c_str(), level.empty() ? nullptr : named, &error);
    if (!found) throw std::runtime_error(error.text);
    if (read_checksum(path) != EXPORT_CHECKSUM) {
        latbench_close(found);
        throw std::runtime_error(path + ": the library is of another export; use the files that were exported together");
    }
    latbench_set_share(found, share, nullptr);
    const Model model(found, latbench_close);
    opened[level] = model;
    return model;
}

}  // namespace
}  // namespace latbench
