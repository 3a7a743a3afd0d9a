// The routes of /openapi.json, each with its fields and a form to try it.

import { ApiError, get, key, request } from "./api.js";
import { $, h } from "./dom.js";
import { paint } from "./settings.js";

paint();
let schema = {};

const resolve = (node) => (node?.$ref ? resolve(node.$ref.slice(2).split("/").reduce((at, part) => at[part], schema)) : node ?? {});

/** A type in words. */
function typeOf(given) {
  const node = resolve(given);
  if (node.anyOf) return node.anyOf.filter((one) => one.type !== "null").map(typeOf).join(" or ");
  if (node.enum) return node.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (node.const !== undefined) return JSON.stringify(node.const);
  if (node.type === "array") return `list of ${typeOf(node.items)}`;
  return node.format === "binary" ? "file" : node.type ?? "any";
}

function range(given) {
  const node = resolve(given);
  const one = node.anyOf?.map(resolve).find((part) => part.type !== "null") ?? node;
  const told = { minimum: "from", maximum: "to", minLength: "at least", maxLength: "at most", maxItems: "at most" };
  return Object.entries(told).filter(([name]) => one[name] !== undefined).map(([name, word]) => `${word} ${one[name]}`).join(", ");
}

function fields(rows) {
  return h("table", {}, h("tbody", {}, ...rows.map(([name, node, needed]) => h("tr", {},
    h("th", { scope: "row" }, h("code", {}, name), needed ? " *" : ""),
    h("td", {}, [typeOf(node), range(node)].filter(Boolean).join(", ")),
    h("td", { className: "dim" }, node.description ?? resolve(node).description ?? "")))));
}

/** Text with what stands in backquotes as code. */
const withCode = (text) => text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));

function route(path, method, operation) {
  const inside = h("div", { className: "inside" }, h("p", {}, ...withCode(operation.description ?? "")));
  const inputs = (operation.parameters ?? []).map((parameter) => {
    const input = h("input", { "aria-label": parameter.name, placeholder: parameter.name });
    return { ...parameter, input };
  });
  const rows = inputs.map(({ name, schema: node, description, required }) => [name, { ...node, description }, required]);
  const kinds = operation.requestBody?.content ?? {};
  for (const [kind, { schema: node }] of Object.entries(kinds)) {
    const { properties = {}, required = [] } = resolve(node);
    inside.append(h("p", { className: "dim small" }, kind),
      fields(Object.entries(properties).map(([name, field]) => [name, field, required.includes(name)])));
  }
  if (rows.length) inside.append(fields(rows));
  const body = kinds["application/json"] ? h("textarea", { value: example(kinds["application/json"].schema),
    "aria-label": "JSON body", spellcheck: false }) : null;
  const shown = h("pre", { hidden: true, tabIndex: 0, "aria-label": "Answer" });
  const send = h("button", { type: "button", className: "small-button", onclick: async () => {
    shown.hidden = false;
    shown.textContent = "…";
    try {
      let url = path;
      const query = new URLSearchParams();
      for (const { name, in: place, input } of inputs) {
        if (place === "path") url = url.replace(`{${name}}`, encodeURIComponent(input.value));
        else if (input.value) query.set(name, input.value);
      }
      const json = body ? JSON.parse(body.value) : undefined;
      const answer = await (await request(`${url}${query.size ? `?${query}` : ""}`, { method: method.toUpperCase(), json })).text();
      shown.textContent = answer.startsWith("{") ? JSON.stringify(JSON.parse(answer), null, 2) : answer;
    } catch (error) {
      shown.textContent = error instanceof ApiError ? `${error.status}: ${error.message}` : String(error);
    }
  } }, "Send");
  inside.append(...(body ? [body] : []), h("div", { className: "try" }, ...inputs.map(({ input }) => input), send), shown);
  return h("details", { className: "route" }, h("summary", {},
    h("span", { className: `method ${method}` }, method.toUpperCase()), h("code", {}, path),
    h("span", { className: "dim small" }, operation.summary ?? "")), inside);
}

function example(node) {
  const { properties = {}, required = [] } = resolve(node);
  const one = (given) => {
    const field = resolve(given);
    if (field.type === "array") return [one(field.items)];
    if (field.type === "object") return JSON.parse(example(field));
    return field.enum?.[0] ?? (field.anyOf ? one(field.anyOf[0]) : field.type === "string" ? "" : 1);
  };
  return JSON.stringify(Object.fromEntries(required.map((name) => [name, one(properties[name])])), null, 2);
}

async function draw() {
  const field = h("input", { type: "password", autocomplete: "off", value: key.get(), placeholder: "none",
    onchange: () => { key.set(field.value.trim()); draw(); } });
  const asked = h("label", { className: "small" }, "Key of this server ", field);
  try {
    schema = await get("/openapi.json");
  } catch (error) {
    $("reference").replaceChildren(h("p", { className: "notice", role: "alert" }, error.message), asked);
    return;
  }
  const byTag = new Map();
  for (const [path, methods] of Object.entries(schema.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags?.[0] ?? "other";
      byTag.set(tag, [...(byTag.get(tag) ?? []), route(path, method, operation)]);
    }
  }
  const parts = [...byTag].flatMap(([tag, routes]) => [h("h2", {}, tag), ...routes]);
  $("reference").replaceChildren(asked, ...parts);
}

draw();
