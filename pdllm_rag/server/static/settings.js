// What this browser is set to: how questions are asked, the key, the colours.

import { key } from "./api.js";
import { $, h } from "./dom.js";

const STORED = "pdllm-settings";
const NAMES = ["k", "max_new_tokens", "decoder", "policy"];
const WORDS = {
  static_kv: "from stored keys and values", vanilla: "reading everything anew at each pass (slow)",
  independent: "as stored, each passage on its own", joint: "computed together for each question (slow)",
};
let stored = {};
let onKey = () => {};

/** Apply the colours at once, before anything has come from the server. */
export function paint() {
  try { stored = JSON.parse(localStorage.getItem(STORED)) ?? {}; } catch { stored = {}; }
  if (stored.theme) document.documentElement.dataset.theme = stored.theme;
}

/** Only what was changed here: the rest is as the server has it. */
export const options = () => Object.fromEntries(NAMES.filter((name) => name in stored).map((name) => [name, stored[name]]));

export function setUp(changedKey) {
  onKey = changedKey;
  const dialog = $("settings");
  $("open-settings").addEventListener("click", () => open());
  $("k").addEventListener("input", () => { $("k-value").textContent = $("k").value; });
  $("theme").value = stored.theme ?? "";
  $("theme").addEventListener("change", () => {
    keep("theme", $("theme").value || undefined);
    if ($("theme").value) document.documentElement.dataset.theme = $("theme").value;
    else delete document.documentElement.dataset.theme;
  });
  for (const name of NAMES) {
    $(name).addEventListener("change", () => {
      const value = name === "decoder" || name === "policy" ? $(name).value : Number($(name).value);
      if ($(name).checkValidity()) keep(name, value);
      if (stored.decoder === "vanilla") { keep("policy", undefined); $("policy").value = "independent"; }
      $("policy").disabled = $("decoder").value === "vanilla";
    });
  }
  dialog.addEventListener("close", () => {
    $("key-wanted").hidden = true;
    if ($("key").value !== key.get()) { key.set($("key").value.trim()); onKey(); }
  });
}

/** Fill in what the server offers. */
export function offer({ defaults, limits, decoders, policies }) {
  $("k").max = Math.min(limits.max_k, 16);
  $("max_new_tokens").max = limits.max_answer_tokens;
  for (const [name, values] of [["decoder", decoders], ["policy", policies]]) {
    $(name).replaceChildren(...values.map((value) => h("option", { value }, `${value}: ${WORDS[value] ?? "experimental"}`)));
  }
  for (const name of NAMES) $(name).value = stored[name] ?? defaults[name];
  $("k-value").textContent = $("k").value;
  $("policy").disabled = $("decoder").value === "vanilla";
}

export function open(keyWanted = "") {
  $("key").value = key.get();
  $("key-wanted").textContent = keyWanted;
  $("key-wanted").hidden = !keyWanted;
  if (!$("settings").open) $("settings").showModal();
  if (keyWanted) $("key").select();
}

function keep(name, value) {
  if (value === undefined) delete stored[name];
  else stored[name] = value;
  localStorage.setItem(STORED, JSON.stringify(stored));
}
