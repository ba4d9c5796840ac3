// SPDX-License-Identifier: Apache-2.0
// The last lines of one model's servers, followed.

import * as api from "./api.js";
import { byId, make, setOptions, setText } from "./dom.js";
import { plain } from "./words.js";

const MOST_LINES = 1000;

export class Logs {
  #next = 0;
  #model = null;

  constructor() {
    byId("logs-model").addEventListener("change", () => this.look().catch(() => {})); // the next look says what is wrong
  }

  offer(names) {
    setOptions(byId("logs-model"), names);
  }

  choose(model) {
    byId("logs-model").value = model;
    return this.look();
  }

  async look() {
    const model = byId("logs-model").value;
    if (!model) return;
    if (model !== this.#model) this.#begin(model);
    const after = this.#next;
    const answer = await api.read(`logs/${encodeURIComponent(model)}?after=${after}&most=200`);
    if (model === this.#model && after === this.#next) this.#show(answer); // else another look has shown them
  }

  #begin(model) {
    this.#model = model;
    this.#next = 0;
    byId("log-lines").replaceChildren();
    setText(byId("logs-note"), "");
  }

  #show({ lines, next, missed }) {
    if (lines === null) return setText(byId("logs-note"), "Its servers are run by somebody else, who has their logs.");
    const restarted = next < this.#next;
    this.#next = next;
    const box = byId("log-lines");
    if (restarted) box.replaceChildren();
    if (missed) lines = [`(${missed} earlier lines are in the log file)`, ...lines];
    box.append(...lines.map((line) => make("div", { text: plain(line) })));
    while (box.childElementCount > MOST_LINES) box.firstElementChild.remove();
    if (byId("logs-follow").checked && lines.length) box.scrollTop = box.scrollHeight;
  }
}
