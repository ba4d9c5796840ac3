// SPDX-License-Identifier: Apache-2.0
// Requests that have not ended.

import { byId, make, setText } from "./dom.js";
import { duration } from "./words.js";

export function showRequests({ count, requests }) {
  setText(byId("requests-count"), count ? `${count}${count > requests.length ? `, the oldest ${requests.length} of them:` : ""}` : "none");
  byId("requests-table").hidden = count === 0;
  byId("requests-rows").replaceChildren(...requests.map(row));
}

const row = ({ model, path, phase, for_s: forS }) =>
  make("tr", {}, ...[model, path, phase, duration(forS)].map((text) => make("td", { text })));
