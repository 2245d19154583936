"""Varied strings, the same on every run: what tokenizers get wrong."""

from __future__ import annotations

import random

_TEXT = r"""the of and to in is you that it he was for on are as with his they I at be this have
from one had by word but not what all were we when your can said there use an each which she do how
Don't I'M we'LL they've you're it's he'd O'Neill rock'n'roll naïve café résumé Straße İstanbul
HTTPServer camelCase snake_case kebab-case UPPER Title 3.14 1e-9 0xDEADBEEF 12345678 2024-02-30
1,000 $9.99 50% #tag @user a/b C:\path ~/x ../y <b>bold</b> &amp; {"k": [1, 2]} foo(bar); x==y !=~
---- ==== ____ ``` ''' ... …… ,,;;::!!?? (()) [[]] {{}} <> || && ++ -- ** // \\ ^^ %% $$ ## @@ ~~
`` "" '' +1 -1 *a* _b_ http://example.com/?q=a+b&c=d#e user@example.com 10:30 «quoted» “curly” ‘x’
"""
_WORDS = _TEXT.split()

_SCRIPTS = [
    "你好，世界！今天天气很好。",
    "東京都は日本の首都です。カタカナ・ひらがな",
    "안녕하세요 세계 여러분",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣٤٥",
    "שלום עולם",
    "Привет, мир! Ёлка 42",
    "Γειά σου Κόσμε",
    "नमस्ते दुनिया १२३",
    "สวัสดีชาวโลก",
    "Xin chào thế giới",
    "ქართული ენა",
    "ሰላም ልዑል",
    "ພາສາລາວ",
    "Zażółć gęślą jaźń",
    "Þórður Æsir øre",
    "ﬁ ﬂ ligatures Ⅷ ½ ² ³ ₄ ①②③ ⑩ 𝟘𝟙𝟚 𝔘𝔫𝔦",
    "ǅ ǈ ǋ ʰ ʷ ᵃ",
    "e\u0301 vs \u00e9, A\u030a vs \u00c5, \u1100\u1161\u11a8",
    "\u0646\u0651\u064e",
    "q\u0307\u0323",
    "a \U00011de1\U00016ff4 b",  # numerals of Unicode 16 and 17
]

_EMOJI = ["🙂", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "❤️", "1️⃣", "🧑🏿‍🚀", "☃", "🫠", "😀😃😄"]

_SPACES = [" ", "  ", "   ", "\t", "\n", "\r\n", "\r", "\n\n", " \n", "\n ", "\t\t", " \t \n \r\n"]
_SPACES += list("\u00a0\u2003\u3000\u200b\ufeff\v\f\x85\u2028\u2581")

_CONTROL = [chr(i) for i in range(32)]
_CONTROL += [
    "\x7f",
    "\x80",
    "\x9f",
    "\ufffd",
    "\ufffe",
    "\U0010ffff",
    "\U000e0041",
    "\u202e",
    "\0\0",
]
_CONTROL += ["\ud7ff", "\ue000", "\U0001fffe"]

_CODE = [
    'def f(x: int = 3) -> str:\n    """Doc."""\n    return f"{x!r:>10}"  # note\n',
    "for (int i = 0; i < n; ++i) {\r\n\tsum += a[i] * b[i];\r\n}\r\n",
    "SELECT * FROM t WHERE a = 'it''s' AND b >= 10;\n",
    '<div class="a">\n\t<p>Hi&nbsp;</p>\n</div>',
    "#!/bin/sh\nset -eu; echo \"$HOME\" | sed 's/a/b/g' > /dev/null 2>&1\n",
    "x = [\n    1,\n\n    2,\n]",
    "a <- function(x) x %>% y |> z",
    "λx. x → ∀y ∃z: y ≤ z ∧ z ≠ ∅",
    "\\frac{1}{2} \\sum_{i=0}^{n} x_i",
    "        deep indentation\n                deeper\n",
    "tabs\there\t\tthere",
    "trailing   \n  leading",
]


def corpus(specials: list[str], count: int = 2400, seed: int = 0) -> list[str]:
    """``count`` distinct strings, with ``specials`` scattered in some of them."""
    rng = random.Random(seed)
    specials = specials or [""]
    pools = [_WORDS, _SCRIPTS, _EMOJI, _SPACES, _CONTROL, _CODE, specials]
    strings = {"": None, " ": None, "a": None}
    for pool in pools:
        strings.update(dict.fromkeys(pool))
    runs = " \n\t=-_.*#a0\u00e9\u4f60"
    strings.update(dict.fromkeys(c * n for c in runs for n in (2, 3, 4, 7, 8, 15, 16, 17, 33, 64)))
    while len(strings) < count:
        kind = rng.randrange(6)
        if kind == 0:  # prose
            text = " ".join(rng.choices(_WORDS, k=rng.randint(1, 25)))
        elif kind == 1:  # anything joined with anything
            text = "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 12)))
        elif kind == 2:  # random code points
            text = "".join(_code_point(rng) for _ in range(rng.randint(1, 24)))
        elif kind == 3:  # digits in all contexts
            text = "".join(rng.choice("0123456789 .,-+xe/:a") for _ in range(rng.randint(1, 30)))
        elif kind == 4:  # code with other line ends
            text = rng.choice(_CODE).replace("\n", rng.choice(["\n", "\r\n", "\r", "\n\n"]))
            text += rng.choice(_SPACES) + rng.choice(_WORDS)
        else:  # a chat
            turn = rng.choice(specials) + rng.choice(_WORDS) + rng.choice(_SPACES)
            turn += " ".join(rng.choices(_WORDS, k=8)) + rng.choice(specials)
            text = turn * rng.randint(1, 3)
        strings[text] = None
    return list(strings)


_RANGES = [(0, 0x7F), (0x20, 0x7E), (0x80, 0x24F), (0x250, 0x1FFF), (0x2000, 0x2BFF)]
_RANGES += [(0x3000, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x1FFFF), (0x20000, 0x10FFFF)]


def _code_point(rng: random.Random) -> str:
    return chr(rng.randint(*rng.choice(_RANGES)))
