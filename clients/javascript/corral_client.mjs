// The JavaScript client of Corral's policy server, for Node 20 or later, in one module without dependencies.
//
// A simulator that drives itself asks for its actions:
//
//     const client = await PolicyClient.connect("127.0.0.1:5555", { numEnvs: 2 });
//     let actions = await client.begin(obs);       // two episodes begin; obs is an NdArray of shape [2, ...]
//     for (;;) {
//       ...                                        // the simulator steps with actions.numbers()
//       actions = await client.step(obs, rewards, { terminated, truncated, nextObs });
//     }                                            // ServerStopped ends it when the training is over
//
// With the option `loadModel`, the server sends the policy, as an ONNX file, and the client chooses the actions itself:
// the same calls return without waiting for the server, and the steps are sent in larger messages. `loadModel` is yours,
// so that this module needs no ONNX runtime; onnxruntime_loader.mjs has one.
//
// The messages are those of the page "The protocol of the policy server". A client sends one message at a time: await
// each call before the next one. Only machines that store the lowest byte first are supported.

import { createCipheriv, createHash, randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import net from "node:net";
import { endianness } from "node:os";
import tls from "node:tls";

if (endianness() !== "LE") throw new Error("corral_client.mjs supports only machines that store the lowest byte first");

/** Version of the protocol. */
export const PROTOCOL = 1;
/** Size of the largest message that the client accepts. */
export const MAX_MESSAGE_BYTES = 64 * 1024 * 1024;
/** Lists and maps inside each other that the client accepts. */
export const MAX_DEPTH = 32;
/** Seconds after which a client that acts itself sends its steps, also if they are few. */
export const MAX_DELAY_S = 1;

/** The server refused a message: `code` is the kind of the error, and the message says what was wrong and where. */
export class ClientError extends Error {
  constructor(code, message) {
    super(message);
    this.name = new.target.name;
    this.code = code;
  }
}

/** The server does not know the episodes of this client any more: reset all envs, and call `begin` again. */
export class EpisodesLost extends ClientError {}

/** The training is over, or the server was not reached for `retryS` seconds. */
export class ServerStopped extends ClientError {}

/** The connection broke; the client connects again. */
class Broken extends Error {}

// Arrays.

const TYPES = {
  "<f4": Float32Array,
  "<f8": Float64Array,
  "<i8": BigInt64Array,
  "<i4": Int32Array,
  "<i2": Int16Array,
  "|i1": Int8Array,
  "<u8": BigUint64Array,
  "<u4": Uint32Array,
  "<u2": Uint16Array,
  "|u1": Uint8Array,
  "|b1": Uint8Array,
};

/** Numbers of one type with a shape, of which the first length is the number of entries K. */
export class NdArray {
  /**
   * @param data A typed array; 64-bit integers are in a BigInt64Array.
   * @param shape Lengths of the axes.
   * @param dtype Type as NumPy writes it; by default the one of `data`.
   */
  constructor(data, shape, dtype = undefined) {
    this.dtype = dtype ?? Object.keys(TYPES).find((name) => data instanceof TYPES[name]);
    if (!(this.dtype in TYPES) || !(data instanceof TYPES[this.dtype])) {
      throw new TypeError("the data of an NdArray must be a typed array that fits its dtype");
    }
    if (product(shape) !== data.length) {
      throw new TypeError(`an array of shape [${shape}] has ${product(shape)} numbers, got ${data.length}`);
    }
    this.data = data;
    this.shape = [...shape];
  }

  /** Return arrays of the same shape as one, with a new first axis. */
  static stack(arrays) {
    const [{ dtype, shape, data }] = arrays;
    const stacked = new TYPES[dtype](data.length * arrays.length);
    arrays.forEach((array, index) => {
      if (array.dtype !== dtype || String(array.shape) !== String(shape)) {
        throw new TypeError("arrays of different shapes or types cannot be stacked");
      }
      stacked.set(array.data, index * data.length);
    });
    return new NdArray(stacked, [arrays.length, ...shape], dtype);
  }

  /** Return the same numbers as another dtype. */
  to(dtype) {
    if (dtype === this.dtype) return this;
    if (!Object.hasOwn(TYPES, dtype)) throw new TypeError(`the numbers of an NdArray cannot have the dtype ${dtype}`);
    const isBig = dtype === "<i8" || dtype === "<u8";
    return new NdArray(TYPES[dtype].from(this.data, isBig ? BigInt : Number), this.shape, dtype);
  }

  /** Return the numbers, all entries after each other, as a plain list of numbers. */
  numbers() {
    return Array.from(this.data, Number);
  }

  /** Return one entry. */
  row(index) {
    const [count, ...shape] = this.shape;
    if (!(index >= 0 && index < count)) throw new RangeError(`there is no entry ${index} of ${count}`);
    const size = product(shape);
    return new NdArray(this.data.slice(index * size, (index + 1) * size), shape, this.dtype);
  }
}

function product(lengths) {
  return lengths.reduce((all, length) => all * length, 1);
}

/** Return arrays as they are in messages: an NdArray, or a list (a Tuple space) or an object of them (a Dict space). */
function packArrays(arrays) {
  if (arrays instanceof NdArray) {
    const { dtype, shape, data } = arrays;
    return { dtype, shape, data: new Uint8Array(data.buffer, data.byteOffset, data.byteLength) };
  }
  if (Array.isArray(arrays)) return arrays.map(packArrays);
  if (arrays === null || typeof arrays !== "object" || ArrayBuffer.isView(arrays)) {
    throw new TypeError("observations and actions must be an NdArray, or an object or a list of them");
  }
  return Object.fromEntries(Object.entries(arrays).map(([name, part]) => [name, packArrays(part)]));
}

function unpackArrays(packed) {
  if (Array.isArray(packed)) return packed.map(unpackArrays);
  if (packed === null || typeof packed !== "object" || packed instanceof Uint8Array) damaged("an array is no map");
  if (Object.keys(packed).sort().join() === "data,dtype,shape") {
    const { dtype, shape, data } = packed;
    const type = typeof dtype === "string" && Object.hasOwn(TYPES, dtype) ? TYPES[dtype] : damaged("its dtype is unknown");
    const isShape = Array.isArray(shape) && shape.every((length) => Number.isSafeInteger(length) && length >= 0);
    if (!isShape || !(data instanceof Uint8Array) || data.length !== product(shape) * type.BYTES_PER_ELEMENT) {
      damaged("an array has not the bytes of its shape");
    }
    return new NdArray(new type(Uint8Array.from(data).buffer), shape, dtype); // a copy, whose start is aligned
  }
  return Object.fromEntries(Object.entries(packed).map(([name, part]) => [name, unpackArrays(part)]));
}

/** Return one tree of arrays whose rows are rows of two others: `rows` are pairs of an index and whether it is of `next`. */
function takeRows(rows, now, next) {
  if (now instanceof NdArray && next instanceof NdArray) {
    if (now.dtype !== next.dtype || String(now.shape) !== String(next.shape)) {
      throw new TypeError("obs and nextObs have different shapes or types");
    }
    const size = product(now.shape.slice(1));
    const data = new TYPES[now.dtype](rows.length * size);
    rows.forEach(([index, isNext], place) => {
      data.set((isNext ? next : now).data.subarray(index * size, (index + 1) * size), place * size);
    });
    return new NdArray(data, [rows.length, ...now.shape.slice(1)], now.dtype);
  }
  if (Array.isArray(now)) return now.map((part, index) => takeRows(rows, part, next[index]));
  return Object.fromEntries(Object.keys(now).map((name) => [name, takeRows(rows, now[name], next[name])]));
}

/** Return one tree of arrays with the rows of several, one after the other. */
function joinRows(trees) {
  const [first] = trees;
  if (!(first instanceof NdArray)) {
    const parts = Object.keys(first).map((key) => [key, joinRows(trees.map((tree) => tree[key]))]);
    return Array.isArray(first) ? parts.map(([, part]) => part) : Object.fromEntries(parts);
  }
  const shape = first.shape.slice(1);
  if (trees.some(({ dtype, shape: other }) => dtype !== first.dtype || String(other?.slice(1)) !== String(shape))) {
    throw new TypeError("obs has another shape or dtype than in the call before");
  }
  const numRows = trees.reduce((count, tree) => count + tree.shape[0], 0);
  const data = new TYPES[first.dtype](numRows * product(shape));
  let place = 0;
  for (const tree of trees) {
    data.set(tree.data, place);
    place += tree.data.length;
  }
  return new NdArray(data, [numRows, ...shape], first.dtype);
}

// Msgpack: nil, true and false, integers, doubles, text, bytes, lists and maps.

/** A number that is always written as a double. */
class Double {
  constructor(value) {
    this.value = value;
  }
}

/** Return a value as msgpack. */
export function pack(value) {
  const parts = [];
  write(value, parts, 0);
  return Buffer.concat(parts);
}

function head(size, fixed, small, large, parts) {
  if (size < small) parts.push(Buffer.from([fixed | size]));
  else parts.push(withNumber(large, 4, (buffer) => buffer.writeUInt32BE(size, 1)));
}

function withNumber(type, numBytes, put) {
  const buffer = Buffer.alloc(1 + numBytes);
  buffer[0] = type;
  put(buffer);
  return buffer;
}

function write(value, parts, depth) {
  if (depth > MAX_DEPTH) throw new TypeError("a value is nested too deep to be sent");
  if (value === null || value === undefined) parts.push(Buffer.from([0xc0]));
  else if (typeof value === "boolean") parts.push(Buffer.from([value ? 0xc3 : 0xc2]));
  else if (typeof value === "bigint") writeInteger(value, parts);
  else if (Number.isSafeInteger(value) && !Object.is(value, -0)) writeInteger(value, parts);
  else if (typeof value === "number") parts.push(withNumber(0xcb, 8, (buffer) => buffer.writeDoubleBE(value, 1)));
  else if (value instanceof Double) parts.push(withNumber(0xcb, 8, (buffer) => buffer.writeDoubleBE(value.value, 1)));
  else if (typeof value === "string") {
    const text = Buffer.from(value, "utf8");
    head(text.length, 0xa0, 32, 0xdb, parts);
    parts.push(text);
  } else if (value instanceof Uint8Array) {
    parts.push(withNumber(0xc6, 4, (buffer) => buffer.writeUInt32BE(value.length, 1)), value);
  } else if (Array.isArray(value)) {
    head(value.length, 0x90, 16, 0xdd, parts);
    for (const part of value) write(part, parts, depth + 1);
  } else if (typeof value === "object") {
    const pairs = Object.entries(value);
    head(pairs.length, 0x80, 16, 0xdf, parts);
    for (const [name, part] of pairs) {
      write(name, parts, depth + 1);
      write(part, parts, depth + 1);
    }
  } else throw new TypeError(`a ${typeof value} cannot be sent`);
}

function writeInteger(value, parts) {
  if (value >= 0 && value < 0x80) parts.push(Buffer.from([Number(value)]));
  else if (value < 0 && value >= -32) parts.push(Buffer.from([Number(value) & 0xff]));
  else if (value >= 0 && value <= 0xffffffff) {
    parts.push(withNumber(0xce, 4, (buffer) => buffer.writeUInt32BE(Number(value), 1)));
  } else if (value >= 0) parts.push(withNumber(0xcf, 8, (buffer) => buffer.writeBigUInt64BE(BigInt(value), 1)));
  else parts.push(withNumber(0xd3, 8, (buffer) => buffer.writeBigInt64BE(BigInt(value), 1)));
}

function damaged(what) {
  throw new ClientError("message", `the server sent a damaged message: ${what}`);
}

/** Return the value of msgpack; no size is trusted before the bytes are there. Integers above 2^53 are BigInts. */
export function unpack(bytes) {
  const reader = new Reader(Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength));
  const value = reader.read(0);
  if (reader.left !== 0) damaged("bytes are left over");
  return value;
}

class Reader {
  static #text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

  constructor(buffer) {
    this.buffer = buffer;
    this.next = 0;
  }

  get left() {
    return this.buffer.length - this.next;
  }

  take(size) {
    if (size > this.left) damaged("it ends too early");
    this.next += size;
    return this.buffer.subarray(this.next - size, this.next);
  }

  uint(size) {
    return size === 8 ? safe(this.take(8).readBigUInt64BE()) : this.take(size).readUIntBE(0, size);
  }

  text(size) {
    try {
      return Reader.#text.decode(this.take(size));
    } catch (error) {
      if (error instanceof ClientError) throw error;
      return damaged("a text is no UTF-8");
    }
  }

  list(size, depth) {
    if (size > this.left) damaged("it ends too early"); // each part has at least one byte
    const found = [];
    for (let i = 0; i < size; i++) found.push(this.read(depth + 1));
    return found;
  }

  map(size, depth) {
    if (size > this.left / 2) damaged("it ends too early");
    const found = Object.create(null); // so that a key such as __proto__ is a key
    for (let i = 0; i < size; i++) {
      const name = this.read(depth + 1);
      if (typeof name !== "string") damaged("the key of a map is no text");
      found[name] = this.read(depth + 1);
    }
    return found;
  }

  read(depth) {
    if (depth > MAX_DEPTH) damaged("it is nested too deep");
    const type = this.uint(1);
    if (type < 0x80) return type;
    if (type < 0x90) return this.map(type & 0x0f, depth);
    if (type < 0xa0) return this.list(type & 0x0f, depth);
    if (type < 0xc0) return this.text(type & 0x1f);
    if (type >= 0xe0) return type - 0x100;
    switch (type) {
      case 0xc0:
        return null;
      case 0xc2:
        return false;
      case 0xc3:
        return true;
      case 0xc4:
      case 0xc5:
      case 0xc6:
        return this.take(this.uint(1 << (type - 0xc4)));
      case 0xca:
        return this.take(4).readFloatBE();
      case 0xcb:
        return this.take(8).readDoubleBE();
      case 0xcc:
      case 0xcd:
      case 0xce:
      case 0xcf:
        return this.uint(1 << (type - 0xcc));
      case 0xd0:
        return this.take(1).readInt8();
      case 0xd1:
        return this.take(2).readInt16BE();
      case 0xd2:
        return this.take(4).readInt32BE();
      case 0xd3:
        return safe(this.take(8).readBigInt64BE());
      case 0xd9:
      case 0xda:
      case 0xdb:
        return this.text(this.uint(1 << (type - 0xd9)));
      case 0xdc:
      case 0xdd:
        return this.list(this.uint(2 << (type - 0xdc)), depth);
      case 0xde:
      case 0xdf:
        return this.map(this.uint(2 << (type - 0xde)), depth);
      default:
        return damaged("it holds an extension type or an unknown byte");
    }
  }
}

function safe(integer) {
  const number = Number(integer);
  return Number.isSafeInteger(number) ? number : integer;
}

function frame(message) {
  const body = pack(message);
  const size = Buffer.alloc(4);
  size.writeUInt32BE(body.length);
  return Buffer.concat([size, body]);
}

/** Refuse lists that are neither empty nor as long as the envs. */
function checkCounts(lists, count) {
  for (const [name, list] of Object.entries(lists)) {
    if (list?.length && list.length !== count) throw new TypeError(`${name} has ${list.length} entries, and envs ${count}`);
  }
}

// The client.

/** A socket whose bytes are read by waiting for them. */
class Connection {
  #parts = [];
  #numBytes = 0;
  #problem = null;
  #wake = null;

  constructor(socket) {
    this.socket = socket;
    socket.on("data", (part) => {
      this.#parts.push(part);
      this.#numBytes += part.length;
      this.#wake?.();
    });
    socket.on("error", (error) => this.#fail(error.message));
    socket.on("end", () => this.#fail("the server closed the connection"));
    socket.on("close", () => this.#fail("the connection is closed"));
  }

  #fail(problem) {
    this.#problem ??= problem;
    this.#wake?.();
  }

  send(data) {
    if (this.#problem === null) this.socket.write(data);
  }

  /** Return so many bytes, or throw `Broken` when the server does not send them within `timeoutS` seconds. */
  async read(size, timeoutS) {
    if (this.#numBytes < size) {
      const timer = setTimeout(() => this.#fail(`no answer for ${timeoutS} seconds`), Math.min(1e3 * timeoutS, 2 ** 31 - 1));
      try {
        while (this.#numBytes < size) {
          if (this.#problem !== null) throw new Broken(this.#problem);
          await new Promise((resolve) => (this.#wake = resolve));
        }
      } finally {
        clearTimeout(timer);
        this.#wake = null;
      }
    }
    const all = this.#parts.length === 1 ? this.#parts[0] : Buffer.concat(this.#parts);
    const rest = all.subarray(size);
    this.#parts = rest.length ? [rest] : [];
    this.#numBytes = rest.length;
    return all.subarray(0, size);
  }

  /** Close the connection, after what was sent if `gently`. */
  close(gently = false) {
    if (gently && this.#problem === null) this.socket.end(() => this.socket.destroy());
    else this.socket.destroy();
  }
}

// Acting locally.

/** Return the parts of a Dict or Tuple space as pairs of key and space, and null of another space. */
function partsOf(space) {
  if (space.type === "Dict") return space.spaces;
  return space.type === "Tuple" ? space.spaces.map((part, index) => [index, part]) : null;
}

/** Return the dtype that a model gets: float32 for floats, and the dtype of the space, such as "int64", for other numbers. */
function dtypeOf({ dtype = "int8" }) { // which is not said of a MultiBinary space
  if (dtype[0] === "f") return "<f4";
  const numBytes = Number(/\d+/.exec(dtype)?.[0] ?? 8) / 8;
  return `${numBytes === 1 ? "|" : "<"}${dtype[0]}${numBytes}`;
}

/** Return observations by the names of a model's inputs, as pairs of name and array in the dtype of the space. */
function namedInputs(space, obs, name) {
  const parts = partsOf(space);
  if (parts !== null) return parts.flatMap(([key, part]) => namedInputs(part, obs?.[key], `${name}/${key}`));
  if (!(obs instanceof NdArray)) throw new TypeError(`${name} must be an NdArray, as the observation space says`);
  return [[name, obs.to(dtypeOf(space))]];
}

/** Return an output of a model, which has so many rows. */
function outputOf(outputs, name, numRows) {
  const found = outputs?.[name];
  if (found instanceof NdArray && found.shape[0] === numRows) return found;
  const said = `the model of loadModel did not return an NdArray '${name}' of ${numRows} rows`;
  throw new TypeError(`${said}: it must return all outputs of the file by their names`);
}

/** Return the actions `[M, ...]` among the outputs of a model. */
function actionsOf(space, outputs, name, numRows) {
  const parts = partsOf(space);
  if (parts === null) return outputOf(outputs, name, numRows);
  const found = parts.map(([key, part]) => [key, actionsOf(part, outputs, `${name}/${key}`, numRows)]);
  return space.type === "Dict" ? Object.fromEntries(found) : found.map(([, part]) => part);
}

/** Return rows `[M, D]` at M of K places, and zeros at the others. */
function spread({ data, shape: [, width] }, rows, count) {
  const found = new Float32Array(count * width);
  rows.forEach((place, index) => found.set(data.subarray(index * width, (index + 1) * width), place * width));
  return new NdArray(found, [count, width]);
}

/** Chooses the actions by the policy that the server sends, and keeps the steps until they are sent. */
class LocalActor {
  #loadModel;
  #stepsPerMessage;
  #random;
  #model = null;
  #numUniform = 0;
  #kept = [];
  #numKept = 0;
  #sinceMs = performance.now();

  constructor(loadModel, stepsPerMessage, seed) {
    if (!(stepsPerMessage >= 1)) throw new RangeError(`stepsPerMessage must be at least 1, got ${stepsPerMessage}`);
    this.#loadModel = loadModel;
    this.#stepsPerMessage = stepsPerMessage;
    // Node has no random numbers with a seed; AES in counter mode makes some.
    const key = seed === null ? randomBytes(16) : createHash("sha256").update(String(seed)).digest().subarray(0, 16);
    this.#random = createCipheriv("aes-128-ctr", key, Buffer.alloc(16));
    this.weightsVersion = 0;
  }

  get hasPolicy() {
    return this.#model !== null;
  }

  /** Act by another policy from now on. */
  async setPolicy({ model, num_uniform: numUniform, weights_version: weightsVersion }) {
    const isPolicy = model instanceof Uint8Array && Number.isSafeInteger(numUniform) && Number.isSafeInteger(weightsVersion);
    if (!isPolicy) damaged("it is no policy");
    this.#model = null;
    let problem = "it returned no function";
    try {
      const loaded = await this.#loadModel(Uint8Array.from(model));
      if (typeof loaded === "function") this.#model = loaded;
    } catch (error) {
      problem = error?.message ?? String(error);
    }
    if (this.#model === null) {
      const file = `the policy with weights version ${weightsVersion}, an ONNX file of ${model.length} bytes`;
      const remedy = "Use a newer ONNX runtime, or leave loadModel out, so that the server chooses the actions.";
      throw new ClientError("model", `loadModel cannot load ${file}: ${problem}. ${remedy}`);
    }
    this.#numUniform = numUniform;
    this.weightsVersion = weightsVersion;
  }

  /** Forget the policy, and the steps that were not sent; they belong to episodes that are lost. */
  forget() {
    this.#model = null;
    this.takeKept();
  }

  /** Keep entries, and return the actions of those that did not end. */
  async act(client, { envs, obs, rewards, begins, terminated, truncated, infos }) {
    const count = envs.length;
    const isOver = envs.map((_, index) => Boolean(terminated?.[index] || truncated?.[index]));
    const rows = [...isOver.keys()].filter((index) => !isOver[index]);
    const inputs = namedInputs(client.observationSpace, obs, "obs").map(([name, array]) => {
      if (array.shape[0] !== count) throw new TypeError(`${name} has ${array.shape[0]} entries, and envs ${count}`);
      return [name, takeRows(rows.map((row) => [row, false]), array, array)];
    });
    const bytes = this.#random.update(Buffer.alloc(4 * rows.length * this.#numUniform));
    const uniform = Float32Array.from({ length: bytes.length / 4 }, (_, i) => (bytes.readUInt32LE(4 * i) >>> 8) / 2 ** 24);
    inputs.push(["uniform", new NdArray(uniform, [rows.length, this.#numUniform])]);
    const found = await this.#model(Object.fromEntries(inputs));
    const actions = actionsOf(client.actionSpace, found, "actions", rows.length);
    const [outputs, draws] = ["outputs", "draws"].map((name) => spread(outputOf(found, name, rows.length), rows, count));
    const flags = [begins, terminated, truncated].map((list) => envs.map((_, index) => Boolean(list?.[index])));
    this.#kept.push({
      envs: [...envs],
      obs: takeRows(envs.map((_, row) => [row, false]), obs, obs), // a copy, because simulators reuse their arrays
      rewards: envs.map((_, index) => Number(rewards?.[index] ?? 0)),
      flags,
      infos: envs.map((_, index) => infos?.[index] ?? {}),
      outputs,
      draws,
    });
    this.#numKept += count;
    return actions;
  }

  /** Return whether the steps that were kept should be sent now. */
  isFull(numEnvs) {
    return this.#numKept >= this.#stepsPerMessage * numEnvs || performance.now() - this.#sinceMs > 1e3 * MAX_DELAY_S;
  }

  /** Return the steps that were kept as entries of a message `steps`, or null; they are kept no longer. */
  takeKept() {
    const kept = this.#kept;
    [this.#kept, this.#numKept, this.#sinceMs] = [[], 0, performance.now()];
    if (kept.length === 0) return null;
    const [begins, terminated, truncated] = [0, 1, 2].map((index) => kept.flatMap(({ flags }) => flags[index]));
    const [envs, rewards, infos] = ["envs", "rewards", "infos"].map((name) => kept.flatMap((one) => one[name]));
    const [obs, outputs, draws] = ["obs", "outputs", "draws"].map((name) => joinRows(kept.map((one) => one[name])));
    const acted = { outputs, draws, weightsVersion: this.weightsVersion };
    const anyInfos = infos.some((info) => Object.keys(info).length > 0);
    return { envs, obs, rewards, begins, terminated, truncated, infos: anyInfos ? infos : null, acted };
  }
}

/**
 * A connection to a policy server, over which the episodes of one or more envs are played; `PolicyClient.connect` makes it.
 *
 * Where the connection breaks, the client connects again, and its episodes continue. Calls reject with `EpisodesLost` if
 * the server does not know them any more, with `ServerStopped` when the training is over, and with `ClientError` where the
 * server refuses a message.
 */
export class PolicyClient {
  #token;
  #name;
  #tls;
  #retryS;
  #timeoutS;
  #session = null;
  #connection = null;
  #isWaiting = false;
  #nextId = 1;
  #maxBytes = MAX_MESSAGE_BYTES;
  #local = null;

  /** Use `PolicyClient.connect`. */
  constructor(address, options = {}) {
    const { numEnvs = 1, token = null, tls: certificates = null, name = "", retryS = 60, timeoutS = 600 } = options;
    const { loadModel = null, stepsPerMessage = 32, seed = null } = options;
    this.address = address;
    this.numEnvs = numEnvs;
    this.#token = token;
    this.#name = name;
    this.#tls = typeof certificates === "string" ? { ca: readFileSync(certificates) } : certificates;
    this.#retryS = retryS;
    this.#timeoutS = timeoutS;
    if (loadModel !== null) this.#local = new LocalActor(loadModel, stepsPerMessage, seed);
    /** Version of the weights that chose the latest actions. */
    this.weightsVersion = 0;
    /** Descriptions of one observation and one action, as the server sent them. */
    this.observationSpace = null;
    this.actionSpace = null;
  }

  /**
   * Connect to `"host:port"` or `"unix:/path/of/the/socket"`.
   *
   * @param options `numEnvs`, the number of envs; `token`, what the server asks for; `tls`, a file of certificates in PEM
   *   format, one of which the server must have, or options of Node's `tls.connect`; `name` in messages of the server;
   *   `retryS`, seconds for which the client tries to reach a server that does not answer; `timeoutS`, seconds that the
   *   server may take for an answer, in which it may also train.
   *
   *   `loadModel`, an async function that loads the policies that the server sends; with it, the client chooses the
   *   actions itself. From the bytes of an ONNX file, a Uint8Array, it returns an async function from the inputs to the
   *   outputs of the file: objects of an NdArray by name. `stepsPerMessage`, steps of each env that such a client sends at
   *   once, 32 by default, and fewer where they take longer than `MAX_DELAY_S`; `seed` of its actions, by default a random
   *   one.
   */
  static async connect(address, options = {}) {
    const client = new PolicyClient(address, options);
    await client.#connect();
    return client;
  }

  /** Begin an episode in some envs (all of them by default), and return their first actions `[K, ...]`. */
  begin(obs, envs = this.#all()) {
    return this.exchange({ envs, obs, begins: envs.map(() => true) });
  }

  /**
   * Report what the latest actions led to, and return the next actions.
   *
   * @param obs Observations `[K, ...]`; where an episode ended, its last observation.
   * @param rewards Rewards of the latest actions, K of them.
   * @param details `terminated` and `truncated`, whether the episode ended or was cut off, K of them; `envs`, the numbers
   *   of the envs; `nextObs`, first observations of the next episodes `[K, ...]`, of which those are used where an episode
   *   ended. Without `nextObs`, `begin` begins the next episodes.
   * @returns Actions of the envs that continue, `[K, ...]` if `nextObs` is given or no episode ended.
   */
  async step(obs, rewards, { terminated = [], truncated = [], envs = this.#all(), nextObs = null } = {}) {
    checkCounts({ rewards, terminated, truncated }, envs.length);
    envs = [...envs]; // a typed array maps to numbers only
    const isOver = envs.map((_, index) => Boolean(terminated[index] || truncated[index]));
    if (nextObs === null || !isOver.includes(true)) return this.exchange({ envs, obs, rewards, terminated, truncated });
    const rows = envs.flatMap((_, index) => (isOver[index] ? [[index, false], [index, true]] : [[index, false]]));
    return this.exchange({
      envs: rows.map(([index]) => envs[index]),
      obs: takeRows(rows, obs, nextObs),
      rewards: rows.map(([index, isNext]) => (isNext ? 0 : rewards[index])),
      begins: rows.map(([, isNext]) => isNext),
      terminated: rows.map(([index, isNext]) => !isNext && Boolean(terminated[index])),
      truncated: rows.map(([index, isNext]) => !isNext && Boolean(truncated[index])),
    });
  }

  /**
   * Send one message `steps`, and return the actions `[M, ...]` of the entries that want one, in their order.
   *
   * @param given K entries in the order of time, of which an env may have several: `envs`, `obs`, and where wanted
   *   `rewards`, `begins`, `terminated`, `truncated`, `actions` that the client takes itself, and `infos`, an object each.
   */
  exchange(given) {
    return this.#alone(async () => {
      const entries = { ...given, envs: [...given.envs] };
      const { envs, rewards, begins, terminated, truncated, actions = null, infos } = entries;
      checkCounts({ rewards, begins, terminated, truncated, infos }, envs.length);
      if (this.#local === null || actions !== null) {
        await this.#flush();
        return this.#ask(entries);
      }
      while (!this.#local.hasPolicy) await this.#request({ type: "ping", id: 0 });
      const chosen = await this.#local.act(this, entries);
      if (this.#local.isFull(this.numEnvs)) await this.#flush();
      return chosen;
    });
  }

  /** Give up the unfinished episodes of some envs, of which the server keeps the complete steps. */
  drop(envs = this.#all()) {
    return this.#alone(async () => {
      await this.#flush();
      await this.#request({ type: "drop", id: 0, envs: [...envs] });
    });
  }

  /** Tell the server that this client is there, where the simulator needs longer than the server waits. */
  ping() {
    return this.#alone(async () => {
      await this.#flush();
      await this.#request({ type: "ping", id: 0 });
    });
  }

  /**
   * End the session; the server drops episodes that are not over.
   *
   * Await it where the client acts itself, because it sends the steps that were kept first.
   */
  async close() {
    if (this.#local !== null && this.#connection !== null && !this.#isWaiting) {
      this.#retryS = 0;
      await this.#alone(() => this.#flush()).catch(() => {}); // the server is gone
    }
    if (this.#connection !== null) {
      this.#connection.send(frame({ type: "bye" }));
      this.#connection.close(true);
      this.#connection = null;
    }
    this.#session = null;
  }

  // Messages.

  #all() {
    return Array.from({ length: this.numEnvs }, (_, index) => index);
  }

  /** Do what a call asks for, if no other call is under way. */
  async #alone(call) {
    if (this.#isWaiting) throw new TypeError("a client sends one message at a time: await the call before");
    this.#isWaiting = true;
    try {
      return await call();
    } finally {
      this.#isWaiting = false;
    }
  }

  /** Send one message `steps`, and return its actions; `acted` is what the policy gave to a client that acts itself. */
  async #ask(entries) {
    const { envs, obs, rewards = null, begins = null, terminated = null, truncated = null } = entries;
    const { actions = null, infos = null, acted = null } = entries;
    const message = { type: "steps", id: 0, envs: [...envs], obs: packArrays(obs) };
    if (rewards !== null) message.rewards = Array.from(rewards, (reward) => new Double(Number(reward)));
    for (const [name, flags] of Object.entries({ begins, terminated, truncated })) {
      const values = flags === null ? [] : Array.from(flags, Boolean);
      if (values.includes(true)) message[name] = values;
    }
    if (actions !== null) message.actions = packArrays(actions);
    if (infos !== null) message.infos = infos;
    if (acted !== null) {
      message.outputs = packArrays(acted.outputs);
      message.draws = packArrays(acted.draws);
      message.weights_version = acted.weightsVersion;
    }
    const answer = await this.#request(message);
    try {
      return unpackArrays(answer.actions);
    } catch (error) {
      this.#disconnect();
      throw error;
    }
  }

  /**
   * Send the steps that a client which acts itself has kept; with the answer may come another policy. So every message
   * comes after it, and the steps of a message have the weights of one version.
   */
  async #flush() {
    const kept = this.#local?.takeKept() ?? null;
    if (kept !== null) await this.#ask(kept);
  }

  /** Send a message, again where the connection broke in between, and return the answer. */
  async #request(message) {
    const id = (message.id = this.#nextId++);
    const data = frame(message);
    if (data.length > this.#maxBytes) {
      throw new ClientError("too_large", `a message of ${data.length} bytes: the server takes ${this.#maxBytes}.`);
    }
    const beganMs = performance.now();
    let brokeMs = -Infinity;
    for (;;) {
      const triedMs = performance.now();
      try {
        if (this.#connection === null) await this.#connect();
        this.#connection.send(data);
        for (;;) {
          const answer = await this.#receive();
          if (answer.type === "policy" && this.#local !== null) {
            await this.#local.setPolicy(answer);
            this.weightsVersion = this.#local.weightsVersion;
          }
          if (answer.id !== id) continue; // it was sent again after a broken connection
          if (this.#local === null) this.weightsVersion = answer.weights_version;
          return answer;
        }
      } catch (error) {
        this.#disconnect();
        if (!(error instanceof Broken)) throw error;
        const [nowMs, retryMs] = [performance.now(), 1e3 * this.#retryS];
        if (nowMs - triedMs > retryMs || brokeMs < beganMs) brokeMs = nowMs; // it held, or broke for the first time
        if (nowMs - brokeMs > retryMs || nowMs - beganMs > 1e3 * this.#timeoutS) {
          throw new ServerStopped("stopped", `the server at ${this.address} does not answer: ${error.message}`);
        }
      }
    }
  }

  /** Return the next message of the server; its errors are thrown. */
  async #receive() {
    const size = (await this.#connection.read(4, this.#timeoutS)).readUInt32BE();
    if (size > MAX_MESSAGE_BYTES) throw new ClientError("too_large", `the server sent a message of ${size} bytes`);
    const message = unpack(await this.#connection.read(size, this.#timeoutS));
    if (message === null || typeof message !== "object" || typeof message.type !== "string") damaged("it has no type");
    if (message.type === "error") throw new ClientError(String(message.code), String(message.message));
    if (message.type === "bye") throw new ServerStopped("stopped", message.message ?? "the training is over");
    return message;
  }

  /** Connect, and say hello, until the server answers or `retryS` is over. */
  async #connect() {
    const givesUpMs = performance.now() + 1e3 * this.#retryS;
    const said = this.#session;
    const hello = { type: "hello", protocol: PROTOCOL, num_envs: this.numEnvs, name: this.#name };
    if (this.#token !== null) hello.token = this.#token;
    if (said !== null) hello.session = said;
    if (this.#local !== null) hello.wants_policy = true;
    let welcome = null;
    for (let pauseMs = 50; welcome === null; pauseMs = Math.min(2 * pauseMs, 1000)) {
      try {
        this.#connection = new Connection(await this.#open());
        this.#connection.send(frame(hello));
        welcome = await this.#receive();
      } catch (error) {
        this.#disconnect();
        const isBusy = error instanceof ClientError && error.code === "busy";
        if (!(error instanceof Broken || isBusy)) throw error;
        if (performance.now() > givesUpMs) {
          if (isBusy) throw error;
          throw new ServerStopped("stopped", `no server answers at ${this.address}: ${error.message}`);
        }
        await new Promise((resolve) => setTimeout(resolve, pauseMs));
      }
    }
    if (typeof welcome.session !== "string" || !(welcome.max_message_bytes > 0)) damaged("it is no welcome");
    this.#session = welcome.session;
    this.#maxBytes = welcome.max_message_bytes;
    if (this.#local === null) this.weightsVersion = welcome.weights_version;
    this.observationSpace = welcome.observation_space;
    this.actionSpace = welcome.action_space;
    if (said !== null && welcome.resumed !== true) {
      this.#local?.forget(); // the policy, too, may be another server's
      throw new EpisodesLost("lost", `the server at ${this.address} does not know the episodes of this client.`);
    }
  }

  /** Return an open socket. */
  #open() {
    let target, event = "connect", connect = net.connect;
    if (this.address.startsWith("unix:")) target = { path: this.address.slice("unix:".length) };
    else {
      const colon = this.address.lastIndexOf(":");
      const host = this.address.slice(0, colon).replace(/^\[|\]$/g, "");
      const port = Number(this.address.slice(colon + 1));
      if (colon < 1 || !(Number.isInteger(port) && port > 0 && port < 65536)) {
        throw new TypeError(`an address is host:port or unix:/path, not ${this.address}`);
      }
      target = { host, port, noDelay: true };
      if (this.#tls !== null) {
        [connect, event] = [tls.connect, "secureConnect"];
        target = { ...(net.isIP(host) ? {} : { servername: host }), ...target, ...this.#tls };
      }
    }
    return new Promise((resolve, reject) => {
      const socket = connect(target);
      const timer = setTimeout(() => socket.destroy(new Error("it does not answer")), Math.min(1e3 * this.#timeoutS, 2 ** 31 - 1));
      const fail = (error) => {
        clearTimeout(timer);
        const problem = error.message || error.code; // no later try would change a certificate
        const isCertificate = socket.authorizationError != null || error.code === "ERR_TLS_CERT_ALTNAME_INVALID";
        reject(
          isCertificate
            ? new ClientError("tls", `the certificate of the server at ${this.address} is not accepted: ${problem}`)
            : new Broken(problem),
        );
      };
      socket.once("error", fail);
      socket.once(event, () => {
        clearTimeout(timer);
        socket.removeListener("error", fail);
        resolve(socket);
      });
    });
  }

  #disconnect() {
    this.#connection?.close();
    this.#connection = null;
  }
}
