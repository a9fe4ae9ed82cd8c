"""Other engines on the same prompts and weights, to be timed in the same run as foresay.

    peer = open_peer("vllm=/opt/vllm/bin/python(ngram=5)", model="smollm2-135m", dtype="bf16", threads=2)
    run = peer.run(prompts, SamplingParams(max_new_tokens=128), batch_size=8)
    peer.close()

transformers runs in this process, vLLM, llama.cpp and economize each in an interpreter of its own; docs/peers.md describes how
they are installed, and what a comparison with them is worth.
"""

from foresay.lab.bench.peers.base import Peer, PeerRun, PeerSpec, parse

__all__ = ["Peer", "PeerRun", "PeerSpec", "open_peer", "parse"]


def open_peer(expression: str, *, model: str, dtype: str, threads: int | None) -> Peer:
    """Open a peer and load its model.

    model: as foresay names it (an alias, a folder, a GGUF file or a hub id). threads: None takes what PyTorch has here.
    Raises ForesayError, most often a ConfigError, of one line that tells what to do.
    """
    spec = parse(expression)
    if spec.kind == "transformers":
        from foresay.lab.bench.peers.transformers import TransformersPeer

        return TransformersPeer(spec, model=model, dtype=dtype, threads=threads)
    from foresay.lab.bench.peers.process import open_worker

    return open_worker(spec, model=model, dtype=dtype, threads=threads)
