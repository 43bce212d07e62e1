// OpenAI's client for Node. Speaks as protocol.py does.

import assert from "node:assert/strict";
import { createInterface } from "node:readline";
import OpenAI from "openai";

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const asked = JSON.parse((await lines.next()).value);
const messages = [{ role: "user", content: asked.question }];
const client = (url = asked.url) => new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const create = (more, url) =>
  client(url).chat.completions.create({ model: asked.adapter, messages, temperature: 0, ...more });

async function pieces(url) {
  let said = "";
  for await (const chunk of await create({ stream: true }, url)) said += chunk.choices[0]?.delta.content ?? "";
  return said;
}

function checkArguments(text) {
  assert.deepEqual(Object.keys(JSON.parse(text)).sort(), ["name", "topic"]);
}

const schema = {
  type: "object",
  properties: { answer: { type: "string", maxLength: 20 }, sure: { type: "boolean" } },
  required: ["answer", "sure"],
  additionalProperties: false,
};

const actions = {
  async list() {
    const found = [];
    for await (const model of client().models.list()) found.push(model.id);
    assert(found.includes(asked.adapter));
  },
  async chat() {
    const [choice] = (await create()).choices;
    assert.deepEqual([choice.message.content, choice.finish_reason], [asked.answer, "stop"]);
  },
  async stream() {
    assert.equal(await pieces(), asked.answer);
  },
  async n() {
    const found = (await create({ n: 2 })).choices.map((choice) => choice.message.content);
    assert.deepEqual(found, [asked.answer, asked.answer]);
  },
  async logprobs() {
    const tokens = (await create({ logprobs: true, top_logprobs: 2 })).choices[0].logprobs.content;
    assert(tokens.every((token) => token.logprob <= 0 && token.top_logprobs.length === 2));
  },
  async structured() {
    const form = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
    const answer = await create({ response_format: form, max_tokens: 200 });
    const found = JSON.parse(answer.choices[0].message.content);
    assert.deepEqual(Object.keys(found).sort(), ["answer", "sure"]);
    assert.equal(typeof found.sure, "boolean");
  },
  async tools() {
    const tool_choice = { type: "function", function: { name: asked.tool } };
    const answer = await create({ model: asked.caller, tools: asked.tools, tool_choice });
    const [call] = answer.choices[0].message.tool_calls;
    assert.equal(call.function.name, asked.tool);
    checkArguments(call.function.arguments);
  },
  async loop() {
    const first = (await create({ model: asked.caller, tools: asked.tools })).choices[0].message;
    const [call] = first.tool_calls;
    assert.equal(call.function.name, asked.tool);
    checkArguments(call.function.arguments);
    const result = { role: "tool", tool_call_id: call.id, content: asked.result };
    const history = [...messages, first, result];
    const last = await create({ model: asked.caller, tools: asked.tools, messages: history });
    assert(last.choices[0].message.content.includes(asked.result));
  },
  async cancel() {
    const stream = await create({ stream: true, max_tokens: 1500, ignore_eos: true });
    for await (const _ of stream) break;
  },
  async errors() {
    await assert.rejects(create({ model: "nobody" }), (error) => error.code === "model_not_found");
    await assert.rejects(create({ temperature: -1 }), (error) => error.param === "temperature");
  },
  async broken() {
    await assert.rejects(pieces(asked.broken_url));
  },
};

for await (const line of lines) {
  try {
    await actions[JSON.parse(line)]();
    console.log(JSON.stringify({ works: true }));
  } catch (error) {
    console.error(error);
    console.log(JSON.stringify({ works: false, why: `${error.name}: ${error.message}`.slice(0, 300) }));
  }
}
