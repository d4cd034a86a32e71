/* The sparse layers of an exported model as an operation of OpenVINO. Its packed file lies beside this library.
 *
 * The operation's opset is of this export alone, so that one program can read several exported models.
 * EXPORT_OPSET: its name. EXPORT_CHECKSUM: that of the packed file, which must be the one of this export.
 *
 * OpenVINO calls an operation in one of its own threads, so a layer shares its work among these: no other thread wakes
 * up, and a call has as many threads as the model was compiled with.
 */
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include "latbench.h"

namespace {

using Model = std::shared_ptr<latbench_model>;

const char *const PACKED_FILE = "model.latbench", *const LEVEL = "LATBENCH_LEVEL";

void share_among_tbb(void *, void (*run)(void *, int64_t), void *job, int64_t parts, int threads) {
    const int64_t shares = std::min<int64_t>(threads, parts);
    tbb::parallel_for(
        int64_t{0}, shares,
        [=](int64_t number) {
            const int64_t behind = parts * (number + 1) / shares;
            for (int64_t part = parts * number / shares; part < behind; part++) run(job, part);
        },
        tbb::static_partitioner());
}

std::string find_packed_file() {
    Dl_info own;
    OPENVINO_ASSERT(dladdr(reinterpret_cast<void *>(&find_packed_file), &own) && own.dli_fname,
                    "the system does not say where this library lies");
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

/* The packed file, which all layers of a process share while there is one. */
Model open_model() {
    static std::mutex mutex;
    static std::map<std::string, std::weak_ptr<latbench_model>> opened;
    const char *named = std::getenv(LEVEL);
    const std::string level = named ? named : "";
    const std::lock_guard<std::mutex> lock(mutex);
    if (Model known = opened[level].lock()) return known;
    latbench_error error;
    const std::string path = find_packed_file();
    latbench_model *found = latbench_open(path.c_str(), level.empty() ? nullptr : named, &error);
    OPENVINO_ASSERT(found, error.text);
    if (read_checksum(path) != EXPORT_CHECKSUM) {
        latbench_close(found);
        OPENVINO_THROW(path, ": the library is of another export; use the files that were exported together");
    }
    latbench_set_share(found, share_among_tbb, nullptr);
    const Model model(found, latbench_close);
    opened[level] = model;
    return model;
}

class SparseLayer : public ov::op::Op {
public:
    OPENVINO_OP("SparseLayer", EXPORT_OPSET);

    SparseLayer() = default;
    SparseLayer(const ov::OutputVector &inputs, const std::string &layer) : Op(inputs), layer_(layer) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        if (!model_) open();
        const ov::PartialShape &x = get_input_partial_shape(0);
        OPENVINO_ASSERT(get_input_element_type(0).compatible(ov::element::f32), "layer ", layer_,
                        " takes float32, not ", get_input_element_type(0));
        set_output_type(0, ov::element::f32, infer_shape(x));
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector &inputs) const override {
        return std::make_shared<SparseLayer>(inputs, layer_);
    }

    bool visit_attributes(ov::AttributeVisitor &visitor) override {
        visitor.on_attribute("layer", layer_);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector &outputs, const ov::TensorVector &inputs) const override {
        const ov::Shape &x = inputs[0].get_shape();
        outputs[0].set_shape(infer_shape(x).to_shape());
        const float *from = inputs[0].data<float>();
        float *to = outputs[0].data<float>();
        const int threads = std::max(1, tbb::this_task_arena::max_concurrency());
        latbench_error error;
        const int code = facts_.kind == LATBENCH_CONV2D
            ? latbench_conv2d(model_.get(), number_, from, x[0], x[1], x[2], x[3], to, outputs[0].get_size(), threads,
                              &error)
            : latbench_linear(model_.get(), number_, from, x.back() ? inputs[0].get_size() / x.back() : 0, x.back(), to,
                              facts_.outputs, threads, &error);
        OPENVINO_ASSERT(!code, error.text);
        return true;
    }

private:
    void open() {
        const Model model = open_model();
        number_ = latbench_find(model.get(), layer_.c_str());
        OPENVINO_ASSERT(number_ >= 0, PACKED_FILE, " has no layer ", layer_, ": it belongs to another export");
        latbench_describe(model.get(), number_, &facts_, nullptr);
        model_ = model;
    }

    ov::PartialShape infer_shape(const ov::PartialShape &x) const {
        if (x.rank().is_dynamic()) return ov::PartialShape::dynamic();
        ov::PartialShape y = x;
        if (facts_.kind == LATBENCH_CONV2D) {
            const ov::PartialShape image{x.size() ? x[0] : ov::Dimension(), facts_.x[0], facts_.x[1], facts_.x[2]};
            OPENVINO_ASSERT(x.compatible(image), "layer ", layer_, " was exported for images ", image, ", not ", x);
            return {x[0], facts_.y[0], facts_.y[1], facts_.y[2]};
        }
        OPENVINO_ASSERT(x.size() && x[x.size() - 1].compatible(facts_.inputs), "layer ", layer_, " takes ",
                        facts_.inputs, " features, not ", x);
        y[x.size() - 1] = facts_.outputs;
        return y;
    }

    std::string layer_;
    Model model_;
    int number_ = -1;
    latbench_layer facts_{};
};

}  // namespace

OPENVINO_CREATE_EXTENSIONS(std::vector<ov::Extension::Ptr>({std::make_shared<ov::OpExtension<SparseLayer>>()}));
