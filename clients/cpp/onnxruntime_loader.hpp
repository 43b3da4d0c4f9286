// Loads the policies that a policy server sends, with ONNX Runtime (https://onnxruntime.ai), whose header and library are
// needed: -I and -L of its directories, and -lonnxruntime.
//
//     corral::Options options;
//     options.load_model = load_model;
//     corral::PolicyClient client("127.0.0.1:5555", 8, options);

#ifndef CORRAL_ONNXRUNTIME_LOADER_HPP
#define CORRAL_ONNXRUNTIME_LOADER_HPP

#include <onnxruntime_cxx_api.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "corral_client.hpp"

namespace corral_onnxruntime {

struct Dtype {
    const char* name;
    ONNXTensorElementDataType type;
};
inline constexpr Dtype DTYPES[] = {
    {"<f4", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},  {"<f8", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE},
    {"<i8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},  {"<i4", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
    {"<i2", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16},  {"|i1", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8},
    {"<u8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64}, {"<u4", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32},
    {"<u2", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16}, {"|u1", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
    {"|b1", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL},
};

inline Ort::Value to_tensor(const corral::Array& array) {
    for (const auto& [name, type] : DTYPES) {
        if (array.dtype != name) continue;
        Ort::AllocatorWithDefaultOptions allocator;
        const std::vector<std::int64_t> shape(array.shape.begin(), array.shape.end());
        Ort::Value tensor = Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), type);
        if (!array.bytes.empty()) std::memcpy(tensor.GetTensorMutableRawData(), array.bytes.data(), array.bytes.size());
        return tensor;
    }
    throw std::invalid_argument("ONNX Runtime gets no array of dtype " + array.dtype);
}

inline corral::Array to_array(const Ort::Value& tensor) {
    const auto info = tensor.GetTensorTypeAndShapeInfo();
    for (const auto& [name, type] : DTYPES) {
        if (info.GetElementType() != type) continue;
        const auto shape = info.GetShape();
        const std::size_t num_bytes = info.GetElementCount() * static_cast<std::size_t>(name[2] - '0');
        const auto* data = static_cast<const char*>(tensor.GetTensorRawData());
        return {name, {shape.begin(), shape.end()}, num_bytes == 0 ? std::string() : std::string(data, num_bytes)};
    }
    throw std::invalid_argument("an output of the model has a type that no array has");
}

}  // namespace corral_onnxruntime

// Returns the model of an ONNX file.
inline corral::Model load_model(const std::string& bytes) {
    static Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "corral");
    Ort::SessionOptions options;
    options.SetIntraOpNumThreads(1);  // the batches are small
    const auto session = std::make_shared<Ort::Session>(env, bytes.data(), bytes.size(), options);
    Ort::AllocatorWithDefaultOptions allocator;
    std::vector<std::string> output_names;
    for (std::size_t i = 0; i < session->GetOutputCount(); ++i)
        output_names.emplace_back(session->GetOutputNameAllocated(i, allocator).get());
    return [session, output_names](const corral::Arrays& inputs) {
        std::vector<const char*> names, wanted;
        std::vector<Ort::Value> tensors;
        for (const auto& [name, array] : inputs) {
            names.push_back(name.c_str());
            tensors.push_back(corral_onnxruntime::to_tensor(array));
        }
        for (const std::string& name : output_names) wanted.push_back(name.c_str());
        const auto outputs = session->Run(Ort::RunOptions{nullptr}, names.data(), tensors.data(), tensors.size(),
                                          wanted.data(), wanted.size());
        corral::Arrays found;
        for (std::size_t i = 0; i < outputs.size(); ++i) found[output_names[i]] = corral_onnxruntime::to_array(outputs[i]);
        return found;
    };
}

#endif  // CORRAL_ONNXRUNTIME_LOADER_HPP
