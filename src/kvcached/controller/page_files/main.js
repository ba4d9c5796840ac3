// SPDX-License-Identifier: Apache-2.0
// Looks at the gateway every two seconds while somebody looks at the page, and hands what it says to the parts of the page.

import * as api from "./api.js";
import { ask } from "./ask.js";
import { Chat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { Logs } from "./logs.js";
import { Memory } from "./memory.js";
import { Models } from "./models.js";
import { showRequests } from "./requests.js";

const PAUSE_MS = 2000;
const LONGEST_PAUSE_MS = 30000;
const NOTICE_MS = 15000;

const chat = new Chat();
const logs = new Logs();
const memory = new Memory();
const models = new Models(say, open, () => look());
let timer = null;
let notice = null;
let failures = 0;
let looking = false;
let asking = false;

// What was said a while ago may be true no more.
function say(text) {
  setText(byId("notice"), text);
  clearTimeout(notice);
  notice = setTimeout(() => setText(byId("notice"), ""), NOTICE_MS);
}

function open(what, model) {
  byId(what).scrollIntoView();
  if (what === "chat") chat.choose(model);
  else logs.choose(model).catch((error) => say(error.message));
}

async function look() {
  if (looking || asking) return;
  looking = true;
  clearTimeout(timer);
  const problem = await lookOnce().catch((error) => error);
  looking = false;
  if (problem?.status === 401) return askForKey("The API key is missing or wrong.");
  failures = problem ? failures + 1 : 0;
  setText(byId("connection"), problem ? (problem instanceof api.Refused ? problem.message : "nobody answers") : "connected");
  if (!document.hidden) timer = setTimeout(look, Math.min(LONGEST_PAUSE_MS, PAUSE_MS * 2 ** failures));
}

async function lookOnce() {
  chat.offer((await api.read("v1/models")).data.map((card) => card.id));
  const [status, traffic, cards, requests] = await Promise.all(["sleep/status", "traffic", "cards", "requests"].map(api.read));
  models.show(status, traffic);
  memory.show(cards);
  showRequests(requests);
  logs.offer(Object.keys(status.models));
  await logs.look();
}

// `problem`: why it has to be asked for; without one it goes on as before when nothing is said.
async function askForKey(problem) {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  const said = await ask("API key", "A key that opens all models opens this page. It is kept until this tab is closed.", { Use: "use" }, { label: "Key", type: "password" });
  if (said) api.keepKey(said.text);
  else if (problem) setText(byId("connection"), problem);
  asking = false;
  if (said || !problem) look();
}

byId("enter-key").addEventListener("click", () => askForKey());
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : look()));
look();
