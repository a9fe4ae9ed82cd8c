"""Other engines (peers) with the same prompts and weights, timed in the same run as foresay.

    peer = open_peer("vllm=/opt/vllm/bin/python(ngram=5)", model="smollm2-135m", dtype="bf16", threads=2)
    run = peer.run(prompts, SamplingParams(max_new_tokens=128), batch_size=8)
    peer.close()

transformers runs in this process; vLLM, llama.cpp and economize run in separate interpreters. docs/how-to/other-engines.md
describes their installation and the limits of a comparison.
"""

from foresay.lab.bench.peers.base import Peer, PeerRun, PeerSpec, parse

__all__ = ["Peer", "PeerRun", "PeerSpec", "open_peer", "parse"]


def open_peer(expression: str, *, model: str, dtype: str, threads: int | None) -> Peer:
    """Open a peer and load its model.

    model: an alias, folder, GGUF file or hub id, as for `foresay.load`. threads: by default the number that PyTorch uses here.
    Raises ForesayError, usually a ConfigError, with a message on one line.
    """
    spec = parse(expression)
    if spec.kind == "transformers":
        from foresay.lab.bench.peers.transformers import TransformersPeer

        return TransformersPeer(spec, model=model, dtype=dtype, threads=threads)
    from foresay.lab.bench.peers.process import open_worker

    return open_worker(spec, model=model, dtype=dtype, threads=threads)
