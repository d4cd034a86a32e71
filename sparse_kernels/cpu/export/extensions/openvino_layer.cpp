/* The sparse layers of an exported model as an operation of OpenVINO. Its packed file lies beside this library. A
 * second input is added to a layer's result.
 *
 * The operation's opset is of this export alone, so that one program can read several exported models.
 * EXPORT_OPSET: its name.
 *
 * OpenVINO calls an operation in one of its own threads, so a layer shares its work among these: no other thread wakes
 * up, and a call has as many threads as the model was compiled with.
 */
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include "packed_beside.hpp"

namespace {

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

class SparseLayer : public ov::op::Op {
public:
    OPENVINO_OP("SparseLayer", EXPORT_OPSET);

    SparseLayer() = default;
    SparseLayer(const ov::OutputVector &inputs, const std::string &layer, const std::string &then)
        : Op(inputs), layer_(layer), then_(then) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        if (!model_) open();
        const ov::PartialShape &x = get_input_partial_shape(0);
        OPENVINO_ASSERT(get_input_element_type(0).compatible(ov::element::f32), "layer ", layer_,
                        " takes float32, not ", get_input_element_type(0));
        const ov::PartialShape y = infer_shape(x);
        OPENVINO_ASSERT(get_input_size() == 1 || (get_input_element_type(1).compatible(ov::element::f32) &&
                                                  y.compatible(get_input_partial_shape(1))),
                        "layer ", layer_, " adds float32 of the shape ", y, ", not ", get_input_element_type(1),
                        " of ", get_input_partial_shape(1));
        set_output_type(0, ov::element::f32, y);
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector &inputs) const override {
        return std::make_shared<SparseLayer>(inputs, layer_, then_);
    }

    bool visit_attributes(ov::AttributeVisitor &visitor) override {
        visitor.on_attribute("layer", layer_);
        visitor.on_attribute("then", then_);
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
        int code = facts_.kind == LATBENCH_CONV2D
            ? latbench_conv2d(model_.get(), number_, from, x[0], x[1], x[2], x[3], to, outputs[0].get_size(), threads,
                              &error)
            : latbench_linear(model_.get(), number_, from, x.back() ? inputs[0].get_size() / x.back() : 0, x.back(), to,
                              facts_.outputs, threads, &error);
        if (!code && inputs.size() > 1) {
            OPENVINO_ASSERT(inputs[1].get_shape() == outputs[0].get_shape(), "layer ", layer_, " adds ",
                            outputs[0].get_shape(), ", not ", inputs[1].get_shape());
            code = latbench_add(model_.get(), to, inputs[1].data<float>(), to, outputs[0].get_size(), then_ == "relu",
                                threads, &error);
        }
        OPENVINO_ASSERT(!code, error.text);
        return true;
    }

private:
    void open() {
        const latbench::Model model = latbench::open_model(share_among_tbb);
        number_ = latbench_find(model.get(), layer_.c_str());
        OPENVINO_ASSERT(number_ >= 0, latbench::PACKED_FILE, " has no layer ", layer_, ": it belongs to another export");
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

    std::string layer_, then_; /* the activation of what is added: "relu", or "" */
    latbench::Model model_;
    int number_ = -1;
    latbench_layer facts_{};
};

}  // namespace

OPENVINO_CREATE_EXTENSIONS(std::vector<ov::Extension::Ptr>({std::make_shared<ov::OpExtension<SparseLayer>>()}));
