"use strict";
/* The network "air-unwhitened" for one image, and the light of an image: what demo.md computes, without a library.

   A network is the folder that `sn.save_model(half=True)` writes: its config.json, and its safetensors file as base64.
   Maps are Float32Arrays [channels, side, side]. tests/docs/test_live_demo.py compares the scores with PyTorch's and
   the light with `spherenet.data.corrupt`. */
const spherenet = (() => {
  const FLAT = 2 ** -32; // contrast below which a patch has no direction, as in the library

  // Saved tensors --------------------------------------------------------------------------------------------------

  /** Return the number that 16 bits mean in half precision. */
  function fromHalf(bits) {
    const exponent = bits >> 10 & 31, fraction = bits & 1023, sign = bits & 32768 ? -1 : 1;
    if (exponent === 31) throw new Error("weights must be finite");
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
  }

  /** Return {name: {shape, values}} of a safetensors file in base64: length of the header, header in JSON, numbers. */
  function readTensors(base64) {
    const bytes = Uint8Array.from(atob(base64), letter => letter.charCodeAt(0));
    const view = new DataView(bytes.buffer), length = Number(view.getBigUint64(0, true));
    const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
    const readers = { F16: [2, at => fromHalf(view.getUint16(at, true))], F32: [4, at => view.getFloat32(at, true)] };
    const tensors = {};
    for (const [name, { dtype, shape, data_offsets: [begin] = [] }] of Object.entries(header)) {
      if (!(dtype in readers)) continue; // metadata, and counters of BatchNorm
      const [size, read] = readers[dtype], start = 8 + length + begin;
      const count = shape.reduce((product, side) => product * side, 1);
      tensors[name] = { shape, values: Float32Array.from({ length: count }, (_, index) => read(start + size * index)) };
    }
    return tensors;
  }

  // Layers -----------------------------------------------------------------------------------------------------------

  /** Return each kernel without its mean and divided by its norm: Eq. 14. */
  function centeredDirections({ shape, values }, eps) {
    const size = values.length / shape[0], unit = new Float32Array(values.length);
    for (let start = 0; start < values.length; start += size) {
      let mean = 0, squares = 0;
      for (let i = start; i < start + size; i++) mean += values[i] / size;
      for (let i = start; i < start + size; i++) squares += (values[i] - mean) ** 2;
      for (let i = start; i < start + size; i++) unit[i] = (values[i] - mean) / Math.sqrt(squares + eps);
    }
    return { shape, values: unit };
  }

  /** Return maps with a border of zeros. */
  function padded(maps, channels, side) {
    const wide = side + 2, out = new Float32Array(channels * wide * wide);
    for (let row = 0; row < channels * side; row++) {
      const channel = Math.floor(row / side), y = row % side;
      out.set(maps.subarray(row * side, (row + 1) * side), channel * wide * wide + (y + 1) * wide + 1);
    }
    return out;
  }

  /** Return the convolution of maps with 3×3 kernels. */
  function convolve(maps, side, { shape: [filters, channels], values: kernels }) {
    const wide = side + 2, x = padded(maps, channels, side), out = new Float32Array(filters * side * side);
    const sums = new Float64Array(side * side);
    for (let filter = 0; filter < filters; filter++) {
      sums.fill(0);
      for (let channel = 0; channel < channels; channel++) {
        const start = 9 * (filter * channels + channel);
        const [a, b, c, d, e, f, g, h, i] = kernels.subarray(start, start + 9);
        for (let y = 0; y < side; y++) {
          let top = channel * wide * wide + y * wide, middle = top + wide, bottom = middle + wide;
          for (let at = y * side; at < (y + 1) * side; at++, top++, middle++, bottom++) {
            sums[at] += a * x[top] + b * x[top + 1] + c * x[top + 2] + d * x[middle] + e * x[middle + 1]
              + f * x[middle + 2] + g * x[bottom] + h * x[bottom + 1] + i * x[bottom + 2];
          }
        }
      }
      out.set(sums, filter * side * side);
    }
    return out;
  }

  /** Return 1/‖x − mean of x‖ for each 3×3 patch over all channels, 0 if the patch is flat: Eq. 14. */
  function inverseDeviations(maps, side, channels, eps) {
    const wide = side + 2, sums = new Float64Array(wide * wide), squares = new Float64Array(wide * wide);
    padded(maps, channels, side).forEach((value, at) => {
      sums[at % sums.length] += value;
      squares[at % sums.length] += value * value;
    });
    const window = (map, y, x) => {
      let sum = 0;
      for (let at = y * wide + x; at <= (y + 2) * wide + x; at += wide) sum += map[at] + map[at + 1] + map[at + 2];
      return sum;
    };
    return Float64Array.from({ length: side * side }, (_, at) => {
      const y = Math.floor(at / side), x = at % side, square = window(squares, y, x);
      const variation = square - window(sums, y, x) ** 2 / (9 * channels);
      return variation <= FLAT * square ? 0 : 1 / Math.sqrt(variation + eps);
    });
  }

  /** Return the largest values of 2×2 squares. */
  function pool(maps, side) {
    const half = side / 2;
    return Float32Array.from({ length: maps.length / 4 }, (_, at) => {
      const start = Math.floor(at / half) * 2 * side + at % half * 2;
      return Math.max(maps[start], maps[start + 1], maps[start + side], maps[start + side + 1]);
    });
  }

  /** Return erf(x) with an error of at most 1.5e-7 (Abramowitz and Stegun, formula 7.1.26). */
  function erf(x) {
    const t = 1 / (1 + 0.3275911 * Math.abs(x));
    const sum = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
    return Math.sign(x) * (1 - sum * Math.exp(-x * x));
  }

  /** Return the GELU of maps: x times the probability that a standard normal number is below x. */
  const gelu = maps => maps.map(x => 0.5 * x * (1 + erf(x * Math.SQRT1_2)));

  // Networks ---------------------------------------------------------------------------------------------------------

  class Network {
    /** Read a network {title, accuracy, config, weights}. */
    constructor({ title, accuracy, config, weights }) {
      const { name, operator, center, eps } = config.model;
      if (name !== "air-unwhitened" || (operator !== null && (operator !== "cosine" || center !== "patch"))) {
        throw new Error("the network must be an air-unwhitened CNN or centered cosine SphereNet");
      }
      Object.assign(this, { title, accuracy, eps, isSphere: operator !== null, ...config.metadata });
      this.tensors = readTensors(weights);
      for (const [name, tensor] of Object.entries(this.tensors)) {
        if (this.isSphere && tensor.shape.length === 4) this.tensors[name] = centeredDirections(tensor, eps);
      }
    }

    /** Return a layer's output: the convolution, or the cosines of centered patches and kernels. */
    layer(name, maps, side) {
      const kernels = this.tensors[name + ".weight"], out = convolve(maps, side, kernels);
      if (!this.isSphere) return out;
      const inverse = inverseDeviations(maps, side, kernels.shape[1], this.eps);
      return out.map((product, at) => product * inverse[at % inverse.length]);
    }

    /** Return BatchNorm of maps, with the statistics of the training. Its scale is 1 in this network. */
    normalize(name, maps) {
      const saved = part => this.tensors[`${name}.${part}`].values;
      const [mean, variance, shift] = [saved("running_mean"), saved("running_var"), saved("bias")];
      const size = maps.length / mean.length;
      return maps.map((value, at) => {
        const channel = Math.floor(at / size);
        return (value - mean[channel]) / Math.sqrt(variance[channel] + 1e-12) + shift[channel];
      });
    }

    /** Return the score of each class for pixels from 0 to 255 [32, 32, 3]. */
    scores(pixels) {
      const { size: [side], mean, std } = this.preprocessing;
      const input = Float32Array.from({ length: 3 * side * side }, (_, at) => {
        const channel = Math.floor(at / (side * side));
        return (pixels[3 * (at % (side * side)) + channel] - mean[channel]) / std[channel];
      });
      let maps = gelu(this.layer("features.first", input, side)), width = side;
      for (let group = 0; `features.groups.${group}.first.weight` in this.tensors; group++) {
        const name = `features.groups.${group}`;
        maps = gelu(this.normalize(name + ".first_norm", pool(this.layer(name + ".first", maps, width), width)));
        width /= 2;
        maps = gelu(this.normalize(name + ".second_norm", this.layer(name + ".second", maps, width)));
      }
      const { shape: [classes, count], values } = this.tensors["head.weight"], last = width * width;
      const features = Array.from({ length: count }, (_, at) => Math.max(...maps.subarray(at * last, (at + 1) * last)));
      return Array.from({ length: classes }, (_, index) =>
        features.reduce((sum, feature, at) => sum + feature * values[index * count + at], 0));
    }

    /** Return the probability of each class. */
    probabilities(pixels) {
      const scores = this.scores(pixels), largest = Math.max(...scores);
      const powers = scores.map(score => Math.exp(score - largest));
      const sum = powers.reduce((total, power) => total + power);
      return powers.map(power => power / sum);
    }
  }

  // Light ------------------------------------------------------------------------------------------------------------

  /* Strengths are from 0 to 1. Positions are those of `spherenet.data.corrupt` for the first image of a set, which the
     demo on your machine uses as well: y and x in units of the side, from the center. */
  const POINT = [0.09097985033, 0.09855993581], DIRECTION = [-0.98027753374, 0.19762580006], CAST = [0, 1, 0.5];
  const EDGE = [0.12835753150, -0.12963449885], SHADED = [-0.97750987990, 0.21088962680];
  const LIGHTS = {
    spot: (p, s, y, x) => p * (1 - s * (1 - Math.exp(-8 * ((y - POINT[0]) ** 2 + (x - POINT[1]) ** 2)))),
    ramp: (p, s, y, x, side) => {
      const reach = (side - 1) / 2 / side * (Math.abs(DIRECTION[0]) + Math.abs(DIRECTION[1]));
      return p * (1 - s * (y * DIRECTION[0] + x * DIRECTION[1] + reach) / (2 * reach));
    },
    shadow: (p, s, y, x) => (y - EDGE[0]) * SHADED[0] + (x - EDGE[1]) * SHADED[1] > 0 ? p * (1 - s) : p,
    cast: (p, s, y, x, side, channel) => p * (1 - s * CAST[channel]),
    contrast: (p, s) => 127.5 + (1 - s) * (p - 127.5),
  };

  /** Return the nearest integer, the even one of two, as torch rounds. */
  function round(value) {
    const nearest = Math.round(value);
    return nearest - value === 0.5 && nearest % 2 ? nearest - 1 : nearest;
  }

  /** Return pixels [side, side, 3] from 0 to 255 under other light: {name: strength}, one after the other. */
  function changeLight(pixels, strengths) {
    const side = Math.sqrt(pixels.length / 3);
    for (const [name, change] of Object.entries(LIGHTS)) {
      if (!strengths[name]) continue;
      pixels = pixels.map((pixel, at) => {
        const position = Math.floor(at / 3), y = (Math.floor(position / side) - (side - 1) / 2) / side;
        const x = (position % side - (side - 1) / 2) / side;
        return round(change(pixel, strengths[name], y, x, side, at % 3));
      });
    }
    return pixels;
  }

  return { Network, changeLight, lights: Object.keys(LIGHTS), networks: [], samples: [] };
})();
