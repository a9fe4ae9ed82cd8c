"""Chat prompts that were fixed before anything was measured."""

from __future__ import annotations

PROMPTS = [
    "Explain in two sentences why the sky is blue.",
    "List five vegetables that grow in winter.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate to French: The train leaves at noon.",
    "What is 17 times 23? Show the steps.",
    "Fix the typos and repeat the rest: Teh cat sat on teh mat. It was a sunny day and the birds sang in the tall trees.",
    "Copy this list in capital letters: apple, pear, plum, cherry, quince, medlar.",
    "Give me a name for a bakery by the sea.",
    "Summarise: Rivers carry sediment. Where they slow down, it settles and builds deltas.",
    "Which words in 'the quick brown fox jumps over the lazy dog' have five letters?",
    "Write a short poem about rain.",
    "Continue: def area(width, height):\n    return width * height\n\ndef perimeter(width, height):\n",
    "How do I boil an egg?",
    "Name the capital of each: Italy, Spain, Portugal, Greece.",
    "Turn into a question: The library opens at nine.",
    "A shop sells 3 pens for 2 euros. How much are 12 pens?",
    "Write an e-mail asking a neighbour to water the plants.",
    "Quote the second sentence: Bees dance. They point to flowers. Others follow.",
    "What does the word 'ephemeral' mean?",
    "Repeat after me, once: she sells sea shells by the sea shore, and he mends nets by the pier.",
]
