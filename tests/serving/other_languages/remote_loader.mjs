// Loads ONNX files for the tests: a thread of the test runs them, at the Unix socket MODEL_RUNNER.
import net from "node:net";

import { NdArray, pack, unpack } from "../../../clients/javascript/corral_client.mjs";

let latest = null; // an older model is not used any more, and its connection would keep Node running

/** Return a function that sends a body and returns the answer. */
function connect() {
  const socket = net.connect(process.env.MODEL_RUNNER);
  latest?.destroy();
  latest = socket;
  socket.unref();
  let data = Buffer.alloc(0), wake = () => {};
  socket.on("data", (part) => {
    data = Buffer.concat([data, part]);
    wake();
  });
  return async (body) => {
    socket.ref();
    const size = Buffer.alloc(4);
    size.writeUInt32BE(body.length);
    socket.write(Buffer.concat([size, body]));
    while (data.length < 4 || data.length < 4 + data.readUInt32BE()) await new Promise((resolve) => (wake = resolve));
    const end = 4 + data.readUInt32BE(), answer = data.subarray(4, end);
    data = data.subarray(end);
    socket.unref();
    return answer;
  };
}

export async function loadModel(bytes) {
  const ask = connect();
  const problem = String(await ask(bytes));
  if (problem) throw new Error(problem);
  return async (inputs) => {
    const plain = Object.entries(inputs).map(([name, { dtype, shape, data }]) => [
      name,
      { dtype, shape, data: new Uint8Array(data.buffer, data.byteOffset, data.byteLength) },
    ]);
    const outputs = Object.entries(unpack(await ask(pack(Object.fromEntries(plain)))));
    const types = { "<f4": Float32Array, "<i8": BigInt64Array };
    return Object.fromEntries(
      outputs.map(([name, { dtype, shape, data }]) => [name, new NdArray(new types[dtype](Uint8Array.from(data).buffer), shape)]),
    );
  };
}
