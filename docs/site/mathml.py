"""Typesets a formula: the expressions that `explain` prints, as MathML, which browsers draw without
a script or a font from elsewhere.

`data-name` on an element is the name of the printed formula that it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from policyloss.explanations.algebra.expression import COMPARISONS, Expression
from policyloss.explanations.formula import Line
from policyloss.parts.wording import number as number_text

# A subscript after the first word; words of several letters are set upright.
LETTERS = {
    "logp": "log π θ",
    "old_logp": "log π old",
    "rollout_logp": "log π rollout",
    "ref_logp": "log π ref",
    "teacher_logp": "log π teacher",
    "ratio": "r",
    "log_ratio": "log r",
    "weight": "w",
    "log_weight": "log w",
    "w": "ω",
    "advantages": "A",
    "surrogate": "ℓ",
    "token_loss": "ℓ token",
    "loss": "ℒ",
    "entropy": "H",
    "divergence": "D",
    "tau": "τ",
    "kl": "KL",
    "N_group": "N group",
    "p0": "p old",
}
SIGNS = {"*": "·", "-": "−", "<=": "≤", ">=": "≥", "!=": "≠", "==": "=", "&": "∧", "|": "∨"}
PRECEDENCE = {
    **dict.fromkeys(COMPARISONS, 3),
    "|": 1,
    "&": 2,
    **dict.fromkeys("+-", 4),
    "negative": 5,
    "*": 5,
    "~": 6,
    "**": 7,
}
ATOM = 8
FENCES = {"abs": ("|", "|"), "sg": ("[", "]"), "floor": ("⌊", "⌋")}


def formula(lines: Sequence[Line]) -> str:
    """The lines of a formula below each other, aligned at their equals signs."""
    rows = "".join(
        f"<mtr><mtd>{_name(line.name)}</mtd><mtd><mo>=</mo></mtd><mtd>{expression(line.tree)}</mtd></mtr>"
        for line in lines
    )
    return (
        f'<math display="block"><mtable class="formula" displaystyle="true">{rows}</mtable></math>'
    )


def symbols(lines: Sequence[Line]) -> str:
    """What the letters of a formula stand for, as HTML."""
    used = [str(x.value) for line in lines for x in line.tree.walk() if x.operator == "name"]
    used += [line.name for line in lines]
    names = dict.fromkeys(name for name in used if name in LETTERS)
    pairs = [f"<math>{_name(name)}</math> is <code>{name}</code>" for name in names]
    return f'<p class="symbols">{", ".join(pairs)}.</p>'


def expression(x: Expression, least: int = 0) -> str:
    """One expression, in brackets if it binds weaker than `least`."""
    precedence = PRECEDENCE.get(x.operator, ATOM)
    if x.operator == "name":
        text, precedence = _name(str(x.value)), ATOM
    elif x.operator == "number":
        text = _number(float(x.value))
        precedence = PRECEDENCE["negative"] if float(x.value) < 0 else ATOM
    elif x.operator == "boolean":
        text = f"<mtext>{x.value}</mtext>"
    elif x.operator == "call":
        text = _call(str(x.value), x.arguments)
    elif len(x.arguments) == 1:
        sign = "−" if x.operator == "negative" else "¬"
        text = f"<mo>{sign}</mo>{expression(x.arguments[0], precedence)}"
    elif x.operator == "/":
        text, precedence = f"<mfrac>{_row(x.arguments[0])}{_row(x.arguments[1])}</mfrac>", ATOM
    elif x.operator == "**":
        base = f"<mrow>{expression(x.arguments[0], ATOM)}</mrow>"
        text = f"<msup>{base}{_row(x.arguments[1])}</msup>"
    else:
        left = expression(x.arguments[0], precedence)
        right = expression(x.arguments[1], precedence + 1)
        text = f"{left}<mo>{escape(SIGNS.get(x.operator, x.operator))}</mo>{right}"
        if x.operator in COMPARISONS:  # which bind closer than "and" and "or", as readers expect
            text = f"<mrow>{text}</mrow>"
    return f"<mrow><mo>(</mo>{text}<mo>)</mo></mrow>" if precedence < least else text


def _row(x: Expression) -> str:
    return f"<mrow>{expression(x)}</mrow>"


def _name(name: str) -> str:
    words = LETTERS.get(name, name.replace("_", " ")).split(" ")
    operator = f"<mi>{words.pop(0)}</mi><mspace width='0.15em'/>" if words[0] == "log" else ""
    base, *below = words
    text = f"<mi>{base}</mi>"
    if below:
        text = f"<msub>{text}<mrow><mi>{' '.join(below)}</mi></mrow></msub>"
    return f'<mrow data-name="{name}">{operator}{text}</mrow>'


def _number(value: float) -> str:
    text = number_text(abs(value))
    if value in (float("inf"), float("-inf")):
        text = "∞"
    digits, _, power = text.partition("e")
    if power:
        text = f"<mn>{digits}</mn><mo>·</mo><msup><mn>10</mn><mn>{int(power)}</mn></msup>"
        text = f'<mrow data-number="{number_text(abs(value))}">{text}</mrow>'
    else:
        text = f"<mn>{digits}</mn>"
    return f"<mo>−</mo>{text}" if value < 0 else text


def _call(function: str, arguments: tuple[Expression, ...]) -> str:
    if function == "where":
        yes, no = (
            f"<mtr><mtd>{expression(value)}</mtd><mtd>{condition}</mtd></mtr>"
            for value, condition in (
                (arguments[1], f"<mtext>where\u00a0</mtext>{expression(arguments[0])}"),
                (arguments[2], "<mtext>elsewhere</mtext>"),
            )
        )
        # A rule on its left stands for the brace: a brace grows only in a font for mathematics.
        return f'<mtable class="cases" data-call="where">{yes}{no}</mtable>'
    inside = "<mo>,</mo>".join(f"<mrow>{expression(argument)}</mrow>" for argument in arguments)
    left, right = FENCES.get(function, ("(", ")"))
    if function in ("abs", "floor"):
        head = ""
    elif function == "exp":
        return f'<msup data-call="exp"><mi>e</mi><mrow>{expression(arguments[0])}</mrow></msup>'
    elif function in ("sum", "seq_sum", "run_sum"):
        below = {"sum": "tokens", "seq_sum": "sequence", "run_sum": "run"}[function]
        head = f'<munder><mo largeop="true">∑</mo><mtext>{below}</mtext></munder>'
        if function == "sum" and PRECEDENCE.get(arguments[0].operator, ATOM) >= PRECEDENCE["*"]:
            left = right = ""
    elif "_" in function:
        over, what = function.split("_", 1)
        over = {"seq": "sequence", "token": "step"}.get(over, over)
        head = f"<msub><mi>{what}</mi><mi>{over}</mi></msub>"
    else:
        head = {"sigmoid": "<mi>σ</mi>"}.get(function, f"<mi>{function}</mi>")
    fenced = f"<mo>{left}</mo>{inside}<mo>{right}</mo>" if left else inside
    return f'<mrow data-call="{function}">{head}{fenced}</mrow>'
