// The glue: integers from Python become typed pointers, the GIL is released, the kernel runs. Everything was checked in Python.
//
// One text serves both faces. They differ in the last argument alone, which says where to run: a number of threads on the CPU, a device
// and its stream under CUDA. The build says what is inside: GRPO_CUDA, the CUDA kernels as well; GRPO_CUDA_ON_HOST, the test-only module,
// in which they run on a CPU and nothing else is.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "kernels.h"

#if defined(GRPO_CUDA_ON_HOST)
#include "host/testing.h"
#endif

namespace py = pybind11;
using namespace grpo;

namespace {

using Address = uintptr_t;  // 0: an absent tensor

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

using ShapeTuple = std::tuple<int, int64_t, int64_t, int64_t>;  // dtype, batch, time, vocab
Shape shape_from(const ShapeTuple& s) { return {DType(std::get<0>(s)), std::get<1>(s), std::get<2>(s), std::get<3>(s)}; }

using RowsTuple = std::tuple<Address, int64_t, int64_t>;  // address, strides over batch and time in elements
Rows rows_from(const RowsTuple& r) { return {at<void>(std::get<0>(r)), std::get<1>(r), std::get<2>(r)}; }

using Addresses = std::vector<Address>;  // in the order of the struct's members

Targets targets_from(const Addresses& a) { return {at<const int64_t>(a.at(0)), at<const uint8_t>(a.at(1)), at<const float>(a.at(2))}; }

RowOutputs row_outputs_from(const Addresses& a) { return {at<float>(a.at(0)), at<float>(a.at(1)), at<float>(a.at(2)), at<float>(a.at(3))}; }

SavedRows saved_from(const Addresses& a) { return {at<const float>(a.at(0)), at<const float>(a.at(1)), at<const float>(a.at(2))}; }

TokenInputs token_inputs_from(const Addresses& a) {
    return {at<const float>(a.at(0)), at<const float>(a.at(1)), at<const float>(a.at(2)),
            at<const float>(a.at(3)), at<const float>(a.at(4)), at<const float>(a.at(5))};
}

TokenOutputs token_outputs_from(const Addresses& a) {
    return {at<float>(a.at(0)), at<float>(a.at(1)), at<float>(a.at(2)), at<float>(a.at(3)), at<int8_t>(a.at(4))};
}

// reference.py's PARAMS, then beta. The clip edges are rounded once, from double, as the other backends do: a ratio exactly on an edge
// must be on the same side everywhere.
ObjectiveParams params_from(const std::vector<double>& p) {
    ObjectiveParams params;
    params.objective = Objective(int(p.at(0)));
    params.ratio_min = float(1.0 - p.at(1));
    params.ratio_max = float(1.0 + p.at(2));
    params.ratio_bound = float(p.at(2));
    params.delta = float(p.at(3));
    params.dual_clip = float(p.at(4));
    params.sapo_pos = float(p.at(5));
    params.sapo_neg = float(p.at(6));
    params.kl_estimator = KlEstimator(int(p.at(7)));
    params.max_log_ratio = float(p.at(8));
    params.beta = float(p.at(9));
    return params;
}

using Threads = int;
using DeviceAndStream = std::tuple<int, Address>;

inline int place(Threads threads) { return threads; }
inline cuda::Queue place(const DeviceAndStream& q) { return {std::get<0>(q), at<void>(std::get<1>(q))}; }

// What is called below: overloads that differ in the place alone.
using cpu::logprobs_backward, cpu::logprobs_forward, cpu::loss_and_grad, cpu::objective;
using cuda::group_advantages, cuda::process_advantages, cuda::scale;
using cuda::logprobs_backward, cuda::logprobs_forward, cuda::loss_and_grad, cuda::objective;

inline void scale(const Shape& shape, const Rows& dlogits, const float* factor, int threads) {
    cpu::scale(shape, dlogits, *factor, threads);
}

inline void group_advantages(const Groups& groups, AdvantageScale scale, Baseline baseline, int ddof, double eps, float* out, int) {
    cpu::group_advantages(groups, scale, baseline, ddof, eps, out);
}

inline void process_advantages(const Groups& groups, AdvantageScale scale, Baseline baseline, int ddof, double eps,
                               const int64_t* step_ends, int64_t batch, int64_t steps, int64_t time, double*, float* out, int) {
    cpu::process_advantages(groups, scale, baseline, ddof, eps, step_ends, batch, steps, time, out);
}

template <class Place>
void bind(py::module_ m) {
    const py::call_guard<py::gil_scoped_release> no_gil;

    m.def(
        "logprobs_forward",
        [](const ShapeTuple& shape, const RowsTuple& logits, const Addresses& targets, const Addresses& outputs, const Place& where) {
            logprobs_forward(shape_from(shape), rows_from(logits), targets_from(targets), row_outputs_from(outputs), place(where));
        },
        no_gil);
    m.def(
        "objective",
        [](int64_t rows, Address logps, Address entropy, const Addresses& inputs, Address active, const std::vector<double>& params,
           const Addresses& outputs, const Place& where) {
            objective(rows, at<const float>(logps), at<const float>(entropy), token_inputs_from(inputs), at<const uint8_t>(active),
                      params_from(params), token_outputs_from(outputs), place(where));
        },
        no_gil);
    m.def(
        "logprobs_backward",
        [](const ShapeTuple& shape, const RowsTuple& logits, const Addresses& targets, const Addresses& saved, Address dlogps,
           Address dentropy, const RowsTuple& dlogits, const Place& where) {
            logprobs_backward(shape_from(shape), rows_from(logits), targets_from(targets), saved_from(saved), at<const float>(dlogps),
                              at<const float>(dentropy), rows_from(dlogits), place(where));
        },
        no_gil);
    m.def(
        "loss_and_grad",
        [](const ShapeTuple& shape, const RowsTuple& logits, const Addresses& targets, const Addresses& inputs,
           const std::vector<double>& params, const Addresses& row_outputs, const Addresses& token_outputs, const RowsTuple& dlogits,
           const Place& where) {
            loss_and_grad(shape_from(shape), rows_from(logits), targets_from(targets), token_inputs_from(inputs), params_from(params),
                          row_outputs_from(row_outputs), token_outputs_from(token_outputs), rows_from(dlogits), place(where));
        },
        no_gil);
    m.def(
        "scale",
        [](const ShapeTuple& shape, const RowsTuple& dlogits, Address factor, const Place& where) {
            scale(shape_from(shape), rows_from(dlogits), at<const float>(factor), place(where));
        },
        no_gil);
    m.def(
        "group_advantages",
        [](Address values, Address order, Address offsets, int64_t count, int64_t groups, int scale, int baseline, int ddof, double eps,
           Address out, const Place& where) {
            group_advantages({at<const double>(values), at<const int64_t>(order), at<const int64_t>(offsets), count, groups},
                             AdvantageScale(scale), Baseline(baseline), ddof, eps, at<float>(out), place(where));
        },
        no_gil);
    m.def(
        "process_advantages",
        [](Address values, Address order, Address offsets, int64_t count, int64_t groups, int scale, int baseline, int ddof, double eps,
           Address step_ends, int64_t batch, int64_t steps, int64_t time, Address normalised, Address out, const Place& where) {
            process_advantages({at<const double>(values), at<const int64_t>(order), at<const int64_t>(offsets), count, groups},
                               AdvantageScale(scale), Baseline(baseline), ddof, eps, at<const int64_t>(step_ends), batch, steps, time,
                               at<double>(normalised), at<float>(out), place(where));
        },
        no_gil);
}

}  // namespace

#if !defined(GRPO_MODULE)
#define GRPO_MODULE _C
#endif

PYBIND11_MODULE(GRPO_MODULE, m) {
    m.doc() = "Native kernels of grpo_kernels over raw addresses; grpo_kernels.backends.native is the only caller.";
    m.attr("interface") = 2;  // goes up with any change of a function here: native.py refuses a module that it was not written for

#if !defined(GRPO_CUDA_ON_HOST)
    m.def("isa", &cpu::isa);
    m.def("isas", [] { return py::tuple(py::cast(cpu::isas())); });
    bind<Threads>(m.def_submodule("cpu"));
#endif

#if defined(GRPO_CUDA) || defined(GRPO_CUDA_ON_HOST)
    m.def("cuda_archs", [] { return py::tuple(py::cast(cuda::archs())); });
    py::module_ face = m.def_submodule("cuda");
    bind<DeviceAndStream>(face);
    face.def("force_split", &cuda::force_split);
#else
    m.def("cuda_archs", [] { return py::tuple(); });
#endif

#if defined(GRPO_CUDA)
    face.attr("toolkit") = GRPO_CUDA;  // the version of nvcc, "13.0"
#endif

#if defined(GRPO_CUDA_ON_HOST)
    py::module_ testing = m.def_submodule("host");
    testing.def("launches", [] {
        std::vector<std::tuple<std::string, int, int64_t>> launches;
        for (const host::Launches& l : host::launches()) launches.emplace_back(l.kernel, l.split, l.count);
        return launches;
    });
    testing.def("reports", &host::reports);
    testing.def("forget", &host::forget);
    testing.def("barriers", &host::barriers);
    testing.def("drop_barrier", &host::drop_barrier);
    testing.def("set_arch", &host::set_arch);
#endif
}
