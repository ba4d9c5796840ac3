// SPDX-License-Identifier: Apache-2.0
// What the cards held in the last while, in memory that has a bound. Pure.

export const MOST_SAMPLES = 300;
export const SPAN_MS = 10 * 60 * 1000;

// Bytes by model; pools of nobody's here are under "".
export function bytesByModel(card) {
  const parts = new Map();
  for (const pool of card.pools) {
    const owner = pool.model ?? "";
    parts.set(owner, (parts.get(owner) ?? 0) + pool.leased_bytes);
  }
  return parts;
}

export class History {
  #samples = [];

  add(nowMs, parts) {
    this.#samples.push({ nowMs, parts });
    while (this.#samples.length > MOST_SAMPLES || this.#samples[0].nowMs < nowMs - SPAN_MS) this.#samples.shift();
  }

  get length() {
    return this.#samples.length;
  }

  get spanMs() {
    return this.length ? this.#samples.at(-1).nowMs - this.#samples[0].nowMs : 0;
  }

  models() {
    return [...new Set(this.#samples.flatMap((sample) => [...sample.parts.keys()]))];
  }

  // For each model the outline of its layer, as points in a box of width x height; the newest sample is at the right.
  layers(models, mostBytes, width, height) {
    const newestMs = this.#samples.at(-1)?.nowMs ?? 0;
    const scale = mostBytes > 0 ? height / mostBytes : 0;
    const below = this.#samples.map(() => 0);
    const x = this.#samples.map((sample) => width * (1 - (newestMs - sample.nowMs) / Math.max(this.spanMs, 1)));
    return models.map((model) => {
      const floor = below.map((bytes, index) => [x[index], height - bytes * scale]);
      this.#samples.forEach((sample, index) => (below[index] += sample.parts.get(model) ?? 0));
      const roof = below.map((bytes, index) => [x[index], height - bytes * scale]);
      return [...roof, ...floor.reverse()];
    });
  }
}
