// Asks a server for vectors through `openai`, and through `ai` with @ai-sdk/openai-compatible, and prints what came as
// one JSON object. Arguments: the server's address and the name of a model.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, embedMany } from "ai";
import OpenAI from "openai";

const [root, model] = process.argv.slice(2);
const inputs = ["hi", "there"];
const came = {};

const openai = new OpenAI({ baseURL: `${root}/v1`, apiKey: "any", maxRetries: 0 });
const vectors = (answer) => answer.data.map((each) => Array.from(each.embedding));
const answer = await openai.embeddings.create({ model, input: inputs }); // it asks for base64 by itself
came.openai = vectors(answer);
came.tokens = answer.usage.total_tokens;
came.floats = vectors(await openai.embeddings.create({ model, input: inputs, encoding_format: "float" }));
came.tokenIds = vectors(await openai.embeddings.create({ model, input: [[5, 6], [7]] }));
came.shorter = vectors(await openai.embeddings.create({ model, input: "hi", dimensions: 1 }));
try {
  await openai.embeddings.create({ model, input: "hi", dimensions: 7 });
} catch (error) {
  came.refused = [error.constructor.name, error.status, error.param];
}

const compatible = createOpenAICompatible({ name: "trunkline", baseURL: `${root}/v1`, apiKey: "any" });
const options = { model: compatible.embeddingModel(model), maxRetries: 0 };
came.embedded = [(await embed({ ...options, value: "hi" })).embedding];
came.embeddedMany = (await embedMany({ ...options, values: inputs })).embeddings;
console.log(JSON.stringify(came));
