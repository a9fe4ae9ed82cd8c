#!/usr/bin/env bash
# Train a draft head for a model and compare it with the n-gram drafter.
#
#   MODEL=Qwen/Qwen2.5-0.5B-Instruct examples/train_head.sh my-head
#
# PROMPTS: a file of prompts like those of your application. COUNT, TOKENS and MINUTES: size of the training.
set -euo pipefail
FOLDER=${1:?usage: MODEL=NAME train_head.sh FOLDER}
MODEL=${MODEL:-smollm2-135m}
PROMPTS=${PROMPTS:-shipped}
COUNT=${COUNT:-60}
TOKENS=${TOKENS:-256}
MINUTES=${MINUTES:-60}

# A draft should learn what the target itself generates. Both commands continue an interrupted run.
foresay record "$FOLDER.jsonl" --model "$MODEL" --prompts "$PROMPTS" --count "$COUNT" --max-new-tokens "$TOKENS"
foresay distill "$FOLDER" --model "$MODEL" --outputs "$FOLDER.jsonl" --states "$FOLDER.states" \
    --epochs 1000 --minutes "$MINUTES"

# Greedy replays and live runs have the same steps, so a few prompts are enough to see the tokens per pass.
foresay bench "$FOLDER.results.jsonl" --model "$MODEL" --prompts "$PROMPTS" --count "${BENCH_COUNT:-12}" \
    --max-new-tokens "$TOKENS" --repeats 1 --drafter suffix --drafter "head($FOLDER)" --drafter "hybrid(suffix, head=$FOLDER)"
