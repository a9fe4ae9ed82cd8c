r"""How a vocabulary's texts are split before merges apply, by the names of `tokenizer.ggml.pre`.

Owns llama.cpp's names and the rules they stand for. A pattern isolates its matches within the pieces of the one before it.
llama.cpp writes many of them without \p{Lu} and (?i:...); here they are as the families published them. Builds no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES = "bytes"
"""The step that spells each byte as a character; it comes last unless it is listed."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A rule, and llama.cpp's defaults for files that name it."""

    patterns: tuple[str, ...]
    """Regular expressions (Oniguruma) in the order in which they apply."""
    ignore_merges: bool = False
    """True if a piece that is a token needs no merges."""
    add_bos: bool = False
    """Value of `tokenizer.ggml.add_bos_token` for files without it."""
    composes: bool = False
    """True if the family's own tokenizer composes characters (NFC) first. llama.cpp does not."""
    spaces_marked: bool = False
    """True if spaces are U+2581 and unknown characters become byte tokens, as in SentencePiece; else bytes are characters."""


_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT, _DIGITS, _THREE = r"\p{N}", r"\p{N}+", r"\p{N}{1,3}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _words(number: str, *, before: str = f"{_SUFFIX}|", line_ends: str = r"[\r\n]*", spaces: str = _SPACES) -> str:
    """Return a pattern of the kind of Llama 3: a word takes the character before it."""
    return rf"{before}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}| ?[^\s\p{{L}}\p{{N}}]+{line_ends}|{spaces}"


def _cased(number: str, *, suffix: str = "", line_ends: str = r"[\r\n/]*", without: str = "") -> str:
    """Return a pattern of the kind of GPT-4o: a word ends before an upper-case letter that follows a lower-case one."""
    one, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{without}]", f"[{_LOWER}{without}]"
    words = f"{one}{upper}*{lower}+{suffix}|{one}{upper}+{lower}*{suffix}"
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+{line_ends}|{_SPACES}"


_LLAMA3, _QWEN2 = (_words(_THREE),), (_words(_DIGIT),)
_GPT4O = (_cased(_THREE, suffix=f"{_SUFFIX}?"),)
_MARKS_IN_WORDS = r"[\p{L}\p{M}]+"
_AFTER_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_CHINESE, _IDEOGRAPHS = r"[\u4e00-\u9fa5\u3040-\u30ff]+", r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (_THREE, _CHINESE, rf"{_AFTER_PUNCTUATION}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}")
_PUNCTUATION = r"[\p{P}$+<=>^~|]+"
_ENDS_IN_THREES = (_DIGITS, r"\A\p{N}{1,2}(?=(?:\p{N}{3})*\z)", r"\p{N}{3}")
"""Groups of three counted from the right, in time linear in the number of digits."""
_MOST_THREES = 100
"""Groups of digits that a pattern looks ahead. The published ones have no bound, and take a quadratic time for long numbers."""
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_CASED_LETTERS = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    r"\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    r"\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    r"\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    r"\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113"
    r"\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    r"\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    r"\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\x{10400}-\x{1044f}\x{104b0}-\x{104d3}"
    r"\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
_ASIAN = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff"
    r"\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    r"|[\u3105-\u312f]+|" + _CHINESE
)
_JAIS2 = "|".join(rf"\s{{{1 << power}}}(?!\S)" for power in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s{1}"
_EXAONE_WORDS = r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"


def _pre(*patterns: str, **flags: bool) -> PreTokenizer:
    return PreTokenizer(patterns, **flags)


_RULES: dict[str, PreTokenizer] = {
    "default": _pre(_PUNCTUATION, _GPT2, _DIGITS, "[0-9][0-9][0-9]"),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _pre(
        *_LLAMA3, ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": _pre(*_LLAMA3),
    "minicpm5": _pre(_THREE, _words(_DIGITS), ignore_merges=True),
    "jais-2": _pre(_words(_THREE, spaces=r"\s*[\r\n]+|" + _JAIS2)),
    "deepseek-llm": _pre(
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _IDEOGRAPHS,
        _DIGIT,
    ),
    "deepseek-coder": _pre(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, _DIGIT),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _pre(*_DEEPSEEK3),
    "spark2_5": _pre(_THREE, _CHINESE, rf"{_AFTER_PUNCTUATION}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", _DIGIT),
    "youtu": _pre(_YOUTU, _cased(_DIGIT, suffix=f"{_SUFFIX}?"), ignore_merges=True),
    "falcon": _pre(r"[\p{P}$+<=>^~|`]+", _GPT2, BYTES, _DIGITS, "[0-9][0-9][0-9]"),
    "starcoder refact smollm codeshell exaone minerva-7b mellum2": _pre(_DIGIT, _GPT2),
    "command-r": _pre(_DIGIT, _GPT2, composes=True),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code roberta-bpe "
    "exaone4 jais trillion granite-docling": _pre(_GPT2),
    "mpt olmo": _pre(_GPT2, composes=True),
    "stablelm2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open grok-2": _pre(*_QWEN2),
    "qwen2": _pre(*_QWEN2, composes=True),
    "qwen35": _pre(
        rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_MARKS_IN_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        composes=True,
    ),
    "poro-chat bloom gpt3-finnish": _pre(_BLOOM),
    "viking": _pre(_BLOOM, _DIGIT),
    "tekken": _pre(_cased(_DIGIT), ignore_merges=True, add_bos=True),
    "chameleon": _pre(
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        _DIGIT,
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
        add_bos=True,
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _pre(*_GPT4O),
    "granite-embed-multi-97m": _pre(*_GPT4O, ignore_merges=True),
    "tiny_aya cohere2moe": _pre(rf"\d{{1,3}}(?=(?:\d{{3}}){{0,{_MOST_THREES}}}\b)", *_GPT4O),
    "kimi-k2": _pre(
        r"[\p{Han}]+|" + _cased(_THREE, suffix=f"{_SUFFIX}?", line_ends=r"[\r\n]*", without=r"&&[^\p{Han}]")
    ),
    "superbpe": _pre(_DIGITS, rf"(?=(\d{{3}}){{1,{_MOST_THREES}}}(?!\d))"),
    "bailingmoe bailingmoe2 llada-moe": _pre(
        _words(_DIGIT, before="'(?i:[sdmt]|ll|ve|re)|", spaces=r"\s*[\r\n]|\s+(?!\S)|\s+")
    ),
    "seed-coder": _pre(rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"),
    "ufakzeka": _pre(_words(_DIGIT, before="")),
    "afmoe": _pre(*_ENDS_IN_THREES, _ASIAN, _DEEPSEEK3[-1]),
    "laguna": _pre(r"(?:\r?\n)+(?!\r?\n)(?:(?!\r?\n)[\s\S])*", *_QWEN2),
    "exaone-moe": _pre(
        rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_EXAONE_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "gemma4 granite-embed-multi-311m": _pre(spaces_marked=True, add_bos=True),
    "sarvam-moe": _pre(spaces_marked=True),
}
PRE_TOKENIZERS = {name: rule for names, rule in _RULES.items() for name in names.split()}
"""Rules by llama.cpp's names. "default" is that of files without a name."""
