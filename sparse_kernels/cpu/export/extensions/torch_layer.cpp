/* The sparse layers of an exported model as an operator of torch. Its packed file lies beside this library.
 *
 * It calls torch's stable interface alone. The operator's namespace is of this export alone, so that one program can
 * load several exported models. EXPORT_NAMESPACE: its name.
 *
 * A layer shares its work among torch's own threads: a call has as many as torch has.
 */
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "packed_beside.hpp"

namespace {

using torch::stable::Tensor;

void share_among_torch(void *, void (*run)(void *, int64_t), void *job, int64_t parts, int threads) {
    const int64_t shares = std::min<int64_t>(threads, parts);
    torch::stable::parallel_for(0, shares, 1, [=](int64_t first, int64_t behind) {
        const int64_t end = parts * behind / shares;
        for (int64_t part = parts * first / shares; part < end; part++) run(job, part);
    });
}

latbench_model *open_once() {
    static const latbench::Model model = latbench::open_model(share_among_torch);
    return model.get();
}

/* The result of layer `number` for x (..., features), or for images x (batch, channels, height, width). */
Tensor compute_layer(const Tensor &given, int64_t number) {
    latbench_model *model = open_once();
    latbench_layer facts;
    latbench_error error;
    if (latbench_describe(model, number, &facts, &error)) throw std::runtime_error(error.text);
    if (given.scalar_type() != torch::headeronly::ScalarType::Float)
        throw std::runtime_error(std::string("layer ") + facts.name + " takes float32");
    const Tensor x = torch::stable::contiguous(given);
    const auto sizes = x.sizes();
    const int threads = std::max<int>(1, torch::stable::get_num_threads());
    const float *from = x.const_data_ptr<float>();
    std::vector<int64_t> shape(sizes.begin(), sizes.end());
    if (facts.kind == LATBENCH_CONV2D) {
        if (shape.size() != 4) throw std::runtime_error(std::string("layer ") + facts.name + " takes four dimensions");
        const std::vector<int64_t> result{shape[0], facts.y[0], facts.y[1], facts.y[2]};
        Tensor y = torch::stable::new_empty(x, result);
        if (latbench_conv2d(model, number, from, shape[0], shape[1], shape[2], shape[3], y.mutable_data_ptr<float>(),
                            y.numel(), threads, &error))
            throw std::runtime_error(error.text);
        return y;
    }
    if (shape.empty()) throw std::runtime_error(std::string("layer ") + facts.name + " takes features");
    const int64_t features = shape.back(), tokens = features ? x.numel() / features : 0;
    shape.back() = facts.outputs;
    Tensor y = torch::stable::new_empty(x, shape);
    if (latbench_linear(model, number, from, tokens, features, y.mutable_data_ptr<float>(), facts.outputs, threads,
                        &error))
        throw std::runtime_error(error.text);
    return y;
}

}  // namespace

STABLE_TORCH_LIBRARY(EXPORT_NAMESPACE, library) { library.def("layer(Tensor x, int number) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(EXPORT_NAMESPACE, CPU, library) { library.impl("layer", TORCH_BOX(&compute_layer)); }
