// SPDX-License-Identifier: Apache-2.0
// The models: what each is doing and why, and what can be done with it.

import * as api from "./api.js";
import { ask } from "./ask.js";
import { byId, isEnabled, make, setEnabled, setText } from "./dom.js";
import { duration, rate, size } from "./words.js";

const KINDS = {
  ready: "good", starting: "busy", waking: "busy", draining: "busy", "going to sleep": "busy", asleep: "still", stopped: "still", failed: "bad",
};
const AWAKE = ["ready", "starting", "waking"];
const SLOW_S = 5;

export class Models {
  #tiles = new Map();

  // `say(text)`: tell the reader; `open(what, model)`: go to another part of the page; `refresh`: look again.
  constructor(say, open, refresh) {
    this.say = say;
    this.open = open;
    this.refresh = refresh;
  }

  show(status, traffic) {
    const names = Object.keys(status.models);
    for (const name of names) this.#tile(name).show(status.models[name], traffic.models[name]);
    for (const [name, tile] of this.#tiles) if (!names.includes(name)) this.#remove(name, tile);
  }

  #tile(name) {
    if (!this.#tiles.has(name)) {
      const tile = new Tile(name, this);
      this.#tiles.set(name, tile);
      byId("model-list").append(tile.element);
    }
    return this.#tiles.get(name);
  }

  #remove(name, tile) {
    tile.element.remove();
    this.#tiles.delete(name);
  }

  async act(what, done) {
    try {
      const answer = await what();
      if (answer !== null) this.say(done(answer));
    } catch (error) {
      this.say(error.message);
    }
    this.refresh();
  }
}

class Tile {
  #facts = {};
  #state = make("span", { name: "state" });
  #reason = make("p", { name: "reason" });
  #load = make("p");
  #rates = make("p");

  constructor(name, models) {
    this.name = name;
    this.models = models;
    this.sleepButton = this.#button("Sleep", `Put ${name} to sleep`, () => this.#sleep());
    this.wakeButton = this.#button("Wake", `Wake ${name}`, () => this.#wake());
    this.limitButton = this.#button("Limit", `Limit the memory of ${name}`, () => this.#limit());
    const logs = this.#button("Logs", `Show the logs of ${name}`, () => models.open("logs", name));
    const chat = this.#button("Chat", `Chat with ${name}`, () => models.open("chat", name));
    const buttons = make("div", { name: "line" }, this.sleepButton, this.wakeButton, this.limitButton, logs, chat);
    const head = make("header", {}, make("h3", { text: name }), this.#state);
    this.element = make("li", { name: "tile", "data-model": name }, head, this.#reason, this.#load, this.#rates, buttons);
  }

  #button(text, label, action) {
    const button = make("button", { type: "button", text, "aria-label": label });
    button.addEventListener("click", () => isEnabled(button) && action());
    return button;
  }

  show(facts, traffic) {
    this.#facts = facts;
    setText(this.#state, facts.state);
    this.#state.className = `state is-${KINDS[facts.state] ?? "still"}`;
    setText(this.#reason, facts.reason);
    setText(this.#load, loadOf(facts));
    setText(this.#rates, traffic ? ratesOf(traffic) : "");
    setEnabled(this.sleepButton, facts.can_sleep && AWAKE.includes(facts.state));
    setEnabled(this.wakeButton, !AWAKE.includes(facts.state));
    setEnabled(this.limitButton, facts.is_elastic && facts.servers.some((server) => server.up));
  }

  async #sleep() {
    await this.models.act(async () => {
      const mode = await this.#sleepMode();
      return mode && api.sleep(this.name, mode);
    }, (answer) => `${this.name}: ${answer.state}`);
  }

  // null: it is to stay awake.
  async #sleepMode() {
    const { open, waiting, bring_back_s: backS } = this.#facts;
    if (!open && !waiting && backS < SLOW_S) return "wait";
    const work = open || waiting ? `${open} requests are open, ${waiting} wait. ` : "";
    const answers = open ? { "Let them end first": "wait", "End them now": "abort" } : { Sleep: "wait" };
    return (await ask(`Put ${this.name} to sleep?`, `${work}To wake it takes about ${duration(backS)}.`, answers))?.answer ?? null;
  }

  async #wake() {
    await this.models.act(() => api.wake(this.name), (answer) => `${this.name}: ${answer.state}`);
  }

  async #limit() {
    const text = "Most KV memory of each pool of each server, until the server is started again. A limit that is too low makes requests wait.";
    const said = await ask(`Limit the memory of ${this.name}`, text, { Limit: "limit" }, { label: "A size such as 20GiB, or a share of the card such as 40%" });
    if (!said?.text) return;
    await this.models.act(() => api.limit(this.name, said.text), (answer) => `${this.name}: limited to ${answer.limit_bytes.map(size).join(", ")}`);
  }
}

function loadOf(facts) {
  const up = facts.servers.filter((server) => server.up).length;
  const servers = facts.servers.length > 1 ? `; ${up} of ${facts.servers.length} servers up` : "";
  const idle = facts.idle_s > 0 ? `; idle for ${duration(facts.idle_s)}` : "";
  return `for ${duration(facts.for_s)}; ${facts.open} open, ${facts.waiting} waiting${idle}${servers}`;
}

function ratesOf(traffic) {
  const minute = traffic.windows["60s"];
  const first = minute.ttft_s.p50 === null ? "" : `; first byte after ${duration(minute.ttft_s.p50)}`;
  const trouble = minute.errors + minute.refused ? `; ${minute.errors} failed, ${minute.refused} refused` : "";
  return `last minute: ${rate(minute.requests_per_s)} requests/s, ${rate(minute.tokens_out_per_s)} tokens/s${first}${trouble}`;
}
