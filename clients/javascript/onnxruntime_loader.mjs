// Loads the policies that a policy server sends, with ONNX Runtime: npm install onnxruntime-node
//
//     const client = await PolicyClient.connect("127.0.0.1:5555", { numEnvs: 8, loadModel });

import ort from "onnxruntime-node";

import { NdArray } from "./corral_client.mjs";

const OPTIONS = { intraOpNumThreads: 1 }; // the batches are small

/** Return an async function that runs the model of an ONNX file, from arrays by name to arrays by name. */
export async function loadModel(bytes) {
  const session = await ort.InferenceSession.create(bytes, OPTIONS);
  return async (inputs) => {
    const tensors = Object.entries(inputs).map(([name, { dtype, data, shape }]) => [
      name,
      dtype === "|b1" ? new ort.Tensor("bool", data, shape) : new ort.Tensor(data, shape),
    ]);
    const outputs = Object.entries(await session.run(Object.fromEntries(tensors)));
    return Object.fromEntries(outputs.map(([name, { data, dims }]) => [name, new NdArray(data, dims)]));
  };
}
