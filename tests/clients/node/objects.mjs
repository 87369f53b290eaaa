// Asks for objects through `ai` with @ai-sdk/openai-compatible, and prints what came as one JSON object. Arguments: the
// server's address, the name of a model, and the question.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, Output, streamObject } from "ai";

const [root, model, question] = process.argv.slice(2);
const friend = {
  type: "object",
  properties: { kind: { enum: ["owl", "pig"] }, is_brave: { type: "boolean" } },
  required: ["kind", "is_brave"],
  additionalProperties: false,
};
const schema = jsonSchema({
  type: "object",
  properties: {
    hero: { enum: ["fox", "pig", "owl"] },
    age: { enum: [1, 2, 3] },
    friend: { anyOf: [friend, { type: "null" }] },
  },
  required: ["hero", "age", "friend"],
  additionalProperties: false,
});
const compatible = createOpenAICompatible({
  name: "trunkline",
  baseURL: `${root}/v1`,
  apiKey: "any",
  supportsStructuredOutputs: true,
});
const asked = { model: compatible(model), prompt: question, maxRetries: 0 };
const came = { generated: (await generateObject({ ...asked, schema })).object };
for await (const partial of streamObject({ ...asked, schema }).partialObjectStream) came.streamed = partial;
came.output = (await generateText({ ...asked, output: Output.object({ schema }) })).output;
console.log(JSON.stringify(came));
