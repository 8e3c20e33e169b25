"""A tiny kernel for each class of instructions that the machine knows, to be run by it and by a GPU.

A thread reads 16 words X0 to X15, and writes 16 words Y0 to Y15, of which those that a kernel leaves alone are zero.
T0 to T13 are free. Shared memory begins at `global_smem`, at a multiple of 1024.
"""

import re
from dataclasses import dataclass

import torch

WORDS = 16  # of a thread, both ways
HEADER = """
.version 8.6
.target sm_90a
.address_size 64
.shared .align 1024 .b8 global_smem[16384];
"""
_ENTRY = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u64 .ptr .global .align 1 kernel_param_1{parameters}
)
.reqntid {threads}
{{
	.reg .pred %p<8>;
	.reg .b16 %rs<16>;
	.reg .b32 %r<64>;
	.reg .b64 %rd<16>;
	ld.param.b64 %rd1, [kernel_param_0];
	ld.param.b64 %rd2, [kernel_param_1];
	mov.u32 %r0, %tid.x;
	mul.wide.u32 %rd3, %r0, 64;
	add.s64 %rd1, %rd1, %rd3;
	add.s64 %rd2, %rd2, %rd3;
	{loads}
	{body}
	{stores}
	ret;
}}
"""
_QUADS = [[", ".join(f"{name}{i}" for i in range(at, at + 4)) for at in range(0, WORDS, 4)] for name in "XY"]
# a matrix of 16-bit numbers for the copy engine, and what Triton gives with it: shape, stride and 1
_MATRIX = """,
	.param .align 64 .b8 kernel_param_2[128],
	.param .u32 kernel_param_3,
	.param .u32 kernel_param_4,
	.param .u64 kernel_param_5,
	.param .u64 kernel_param_6"""


@dataclass(frozen=True)
class Case:
    """given: what the words of a thread are; kind: what the results are, two NaN being alike; near: how far results
    may lie apart, relatively: 0 asks for the same bits."""

    body: str
    given: str = "integers"
    kind: torch.dtype = torch.int32
    near: float = 0.0
    threads: int = 32
    matrix: bool = False

    @property
    def text(self) -> str:
        """The kernel, without HEADER."""
        loads = "\n\t".join(f"ld.global.v4.b32 {{{quad}}}, [%rd1+{16 * q}];" for q, quad in enumerate(_QUADS[0]))
        loads += "".join(f"\n\tmov.b32 Y{i}, 0;" for i in range(WORDS))
        stores = "\n\t".join(f"st.global.v4.b32 [%rd2+{16 * q}], {{{quad}}};" for q, quad in enumerate(_QUADS[1]))
        text = _ENTRY.format(
            threads=self.threads,
            loads=loads,
            body=self.body.strip(),
            stores=stores,
            parameters=_MATRIX if self.matrix else "",
        )
        first = {"X": 1, "Y": 33, "T": 50}
        return re.sub(r"\b([XYT])(\d+)\b", lambda m: f"%r{first[m[1]] + int(m[2])}", text)

    def words(self) -> torch.Tensor:
        """int32 [threads, WORDS]."""
        g = torch.Generator().manual_seed(7)
        shape = self.threads, WORDS
        if self.given == "integers":
            return torch.randint(-(2**31), 2**31, shape, generator=g, dtype=torch.int64).to(torch.int32)
        pairs = self.threads, 2 * WORDS
        if self.given == "bf16":
            return torch.randn(pairs, generator=g).bfloat16().view(torch.int32)
        if self.given == "whole bf16":  # whose products and sums are exact
            return torch.randint(-8, 9, pairs, generator=g).bfloat16().view(torch.int32)
        floats = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-9, 9, shape, generator=g).float())
        if self.given == "positive":
            return floats.abs().clamp(2**-6, 16).view(torch.int32)
        if self.given == "any float":
            floats[::5, ::3], floats[1::7, ::2], floats[2::7, 1::2] = float("nan"), float("inf"), -float("inf")
        return floats.view(torch.int32)


def _each(*instructions: str) -> str:
    """One after the other, each with the next result for Y."""
    return "\n\t".join(re.sub(r"\bY\b", f"Y{i}", one) + ";" for i, one in enumerate(instructions))


def _chosen(*conditions: str) -> str:
    """Whether each holds, as 1 or 0."""
    compared = (one.replace(" ", " %p1, ", 1) for one in conditions)
    return "\n\t".join(f"setp.{one}; selp.b32 Y{i}, 1, 0, %p1;" for i, one in enumerate(compared))


_SHARED = "mov.u32 T0, global_smem; shl.b32 T1, %r0, 6; add.s32 T1, T0, T1;"  # 64 bytes of a thread
_OTHER = "xor.b32 T2, %r0, 33; shl.b32 T2, T2, 6; add.s32 T2, T0, T2;"  # of one in another warp
_PUBLISH = "st.shared.v4.b32 [T1], {X0, X1, X2, X3};"

CASES = {
    "sums of integers": Case(_each(
        "add.s32 Y, X0, X1", "sub.s32 Y, X0, X1", "min.s32 Y, X0, X1", "max.s32 Y, X0, X1", "min.u32 Y, X0, X1",
        "neg.s32 Y, X0", "abs.s32 Y, X0", "mov.b32 Y, X3", "cvta.to.global.u64 %rd4, %rd1; cvt.u32.u64 T1, %rd4; "
        "cvt.u32.u64 T2, %rd1; sub.s32 Y, T1, T2",
    )),
    "products of integers": Case(_each(
        "mul.lo.s32 Y, X0, X1", "mul.hi.s32 Y, X0, X1", "mul.hi.u32 Y, X0, X1", "mad.lo.s32 Y, X0, X1, X2",
    ) + """
	mul.wide.s32 %rd4, X0, X1; mov.b64 {Y4, Y5}, %rd4;
	mul.wide.u32 %rd5, X0, X1; mov.b64 {Y6, Y7}, %rd5;
	mad.wide.s32 %rd6, X2, X3, %rd4; mov.b64 {Y8, Y9}, %rd6;
	mad.wide.u32 %rd7, X2, X3, %rd5; mov.b64 {Y10, Y11}, %rd7;
	mul.lo.s64 %rd8, %rd6, %rd7; mov.b64 {Y12, Y13}, %rd8;
	mad.lo.s64 %rd9, %rd6, %rd7, %rd4; mov.b64 {Y14, Y15}, %rd9;
"""),
    "quotients of integers": Case("or.b32 T0, X1, 1; and.b32 T1, X2, 1023; or.b32 T1, T1, 1;" + _each(
        "div.s32 Y, X0, T0", "rem.s32 Y, X0, T0", "div.u32 Y, X0, T0", "rem.u32 Y, X0, T0", "div.s32 Y, X0, T1",
        "rem.s32 Y, X0, T1",
    )),
    "bits": Case("and.b32 T0, X2, 63;" + _each(
        "and.b32 Y, X0, X1", "or.b32 Y, X0, X1", "xor.b32 Y, X0, X1", "not.b32 Y, X0", "shl.b32 Y, X0, T0",
        "shr.u32 Y, X0, T0", "shr.s32 Y, X0, T0", "shf.l.wrap.b32 Y, X0, X1, T0", "shf.r.wrap.b32 Y, X0, X1, T0",
        "lop3.b32 Y, X0, X1, X2, 0xE2", "lop3.b32 Y, X0, X1, X2, 0x96", "prmt.b32 Y, X0, X1, X3",
        "prmt.b32 Y, X0, X1, 0x7362U", "bfe.u32 Y, X0, 5, 7", "bfe.s32 Y, X0, 9, 11", "bfe.s32 Y, X0, 6, 1",
    )),
    "16 bits": Case("""
	mov.b32 {%rs1, %rs2}, X0; shr.u16 %rs3, %rs1, 3; shl.b16 %rs4, %rs1, 5; and.b16 %rs5, %rs1, %rs2;
	xor.b16 %rs6, %rs1, %rs2; cvt.u16.u32 %rs7, X1; mov.u16 %rs8, %rs7; setp.eq.b16 %p1, %rs7, %rs8;
""" + _each(
        "mul.wide.u16 Y, %rs1, %rs2", "mul.wide.s16 Y, %rs1, %rs2", "cvt.u32.u16 Y, %rs3", "cvt.s32.s16 Y, %rs1",
        "mov.b32 Y, {%rs4, %rs5}", "mov.b32 Y, {%rs6, %rs7}", "selp.b32 Y, X3, X4, %p1",
    )),
    "pairs of 16 bits": Case(_each("add.s16x2 Y, X0, X1")),
    "64 bits": Case("""
	mov.b64 %rd4, {X0, X1}; mov.b64 %rd5, {X2, X3};
	add.s64 %rd6, %rd4, %rd5; mov.b64 {Y0, Y1}, %rd6;
	sub.s64 %rd7, %rd4, %rd5; or.b64 %rd7, %rd7, %rd6; mov.b64 {Y2, Y3}, %rd7;
	xor.b64 %rd8, %rd4, %rd5; and.b64 %rd8, %rd8, %rd6; mov.b64 {Y4, Y5}, %rd8;
	shl.b64 %rd9, %rd4, 13; mov.b64 {Y6, Y7}, %rd9; shr.s64 %rd9, %rd4, 7; mov.b64 {Y8, Y9}, %rd9;
	setp.lt.u64 %p1, %rd4, %rd5; selp.b64 %rd10, %rd4, %rd5, %p1; mov.b64 {Y10, Y11}, %rd10;
	cvt.s64.s32 %rd11, X0; mov.b64 {Y12, Y13}, %rd11; cvt.u64.u32 %rd12, X0; mov.b64 {T0, Y14}, %rd12;
	cvt.u32.u64 Y15, %rd9;
"""),
    "comparisons of integers": Case(_chosen(
        "lt.s32 X0, X1", "le.s32 X0, X1", "gt.s32 X0, X1", "ge.s32 X0, X1", "eq.b32 X0, X1", "ne.b32 X0, X0",
        "lt.u32 X0, X1", "gt.u32 X0, X1",
    ) + """
	setp.lt.s32 %p2, X0, X1; setp.lt.s32 %p3, X2, X3; and.pred %p4, %p2, %p3; selp.b32 Y8, 1, 0, %p4;
	or.pred %p4, %p2, %p3; selp.b32 Y9, 1, 0, %p4; xor.pred %p4, %p2, %p3; selp.b32 Y10, 1, 0, %p4;
	not.pred %p5, %p2; mov.pred %p6, %p5; @%p6 mov.b32 Y11, X4; @!%p6 mov.b32 Y12, X5; @%p2 add.s32 Y11, X6, X7;
"""),
    "comparisons of floats": Case(_chosen(
        *(f"{one}{unordered}.f32 X0, X1" for one in ("lt", "le", "gt", "ge", "eq", "ne") for unordered in ("", "u")),
        "nan.f32 X0, X1", "nan.f32 X2, X2",
    ), "any float"),
    "sums of floats": Case(_each(
        "add.f32 Y, X0, X1", "sub.f32 Y, X0, X1", "mul.f32 Y, X0, X1", "fma.rn.f32 Y, X0, X1, X2", "neg.f32 Y, X3",
        "abs.f32 Y, X4", "min.f32 Y, X0, X1", "max.f32 Y, X0, X1", "max.NaN.f32 Y, X0, X1",
        "min.NaN.f32 Y, X0, X1",
        "setp.lt.f32 %p1, X0, X1; selp.f32 Y, X0, X1, %p1",
    ), "any float", torch.float32),
    "approximations": Case(_each(
        "ex2.approx.f32 Y, X0", "sqrt.approx.f32 Y, X0", "rsqrt.approx.ftz.f32 Y, X0", "div.full.f32 Y, X0, X1",
        "div.approx.f32 Y, X0, X1",
    ), "positive", torch.float32, near=2**-20),
    "hyperbolic tangent": Case(_each("tanh.approx.f32 Y, X0"), "positive", torch.float32, near=2**-9.9),
    "bf16": Case(_each(
        "fma.rn.bf16x2 Y, X0, X1, X2", "add.bf16x2 Y, X0, X1", "mul.bf16x2 Y, X0, X1",
    ) + """
	mov.b32 {%rs1, %rs2}, X0; mov.b32 {%rs3, %rs4}, X1; mul.bf16 %rs5, %rs1, %rs3; add.bf16 %rs6, %rs2, %rs4;
	mov.b32 Y3, {%rs5, %rs6};
""", "bf16"),
    "f16": Case(
        _each("add.f16x2 Y, X0, X1", "sub.f16x2 Y, X0, X1", "mul.f16x2 Y, X0, X1"), "integers", torch.float16
    ),
    "conversions of e4m3": Case("""
	mov.b32 {%rs1, %rs2}, X0; cvt.rn.f16x2.e4m3x2 Y0, %rs1; cvt.rn.f16x2.e4m3x2 Y1, %rs2;
""", "integers", torch.float16),
    "conversions": Case("""
	cvt.rn.bf16.f32 %rs1, X0; cvt.rn.f16.f32 %rs2, X0; cvt.rn.satfinite.e4m3x2.f32 %rs3, X0, X1;
""" + _each(
        "cvt.rn.bf16x2.f32 Y, X0, X1", "cvt.rn.f16x2.f32 Y, X0, X1", "mov.b32 Y, {%rs1, %rs2}", "cvt.u32.u16 Y, %rs3",
        "cvt.f32.bf16 Y, %rs1", "cvt.rn.f32.s32 Y, X2",
    ), "float"),
    "lanes": Case("and.b32 T0, X1, 31; elect.sync T1|%p1, -1; selp.b32 T2, 1, 0, %p1;" + _each(
        "shfl.sync.bfly.b32 Y, X0, 5, 31, -1", "shfl.sync.idx.b32 Y, X0, T0, 31, -1", "redux.sync.add.s32 Y, X0, -1",
        "shfl.sync.up.b32 Y, X0, 3, 0, -1", "redux.sync.min.s32 Y, X0, -1", "redux.sync.max.s32 Y, X0, -1",
        "redux.sync.add.s32 Y, T2, -1", "movmatrix.sync.aligned.m8n8.trans.b16 Y, X0",
    )),
    "jumps": Case("""
	mov.b32 T0, 0;
$LOOP:
	add.s32 Y0, Y0, X0; add.s32 T0, T0, 1; setp.lt.s32 %p1, T0, 5; @%p1 bra $LOOP;
	and.b32 T1, T0, 1;
TARGETS: .branchtargets $FIRST, $SECOND;
	brx.idx T1, TARGETS;
$FIRST:
	mov.b32 Y1, X1; bra.uni $END;
$SECOND:
	mov.b32 Y1, X2;
$END:
	bar.warp.sync -1;
"""),
    "shared memory": Case(f"""
	{_SHARED} xor.b32 T2, %r0, 5; shl.b32 T2, T2, 6; add.s32 T2, T0, T2;
	st.shared.v4.b32 [T1], {{X0, X1, X2, X3}}; st.shared.v2.b32 [T1+16], {{X4, X5}}; st.shared.b32 [T1+24], X6;
	cvt.u16.u32 %rs1, X7; st.shared.b16 [T1+30], %rs1; st.shared.b16 [T1+28], %rs1; bar.sync 0;
	ld.shared.v4.b32 {{Y0, Y1, Y2, Y3}}, [T2]; ld.shared.v2.b32 {{Y4, Y5}}, [T2+8]; ld.shared.b32 Y6, [T2+24];
	ld.shared.b8 %rs2, [T2+7]; cvt.u32.u16 Y7, %rs2; ld.shared.v2.b32 {{Y8, Y9}}, [T2+24];
"""),
    "global memory": Case("""
	ld.global.b16 %rs1, [%rd1+6]; ld.global.b8 %rs2, [%rd1+9]; cvt.u32.u16 Y0, %rs1; cvt.u32.u16 Y1, %rs2;
	ld.global.v2.b32 {Y2, Y3}, [%rd1+24]; ld.global.cg.v4.b32 {Y4, Y5, Y6, Y7}, [%rd1+32];
	ld.global.gpu.acquire.b32 Y8, [%rd1+60]; setp.lt.s32 %p1, X0, X1; @%p1 ld.global.b32 Y9, [%rd1+4];
	atom.global.gpu.acq_rel.add.u32 Y10, [%rd1], X1; ld.global.cg.b32 Y11, [%rd1];
	atom.global.gpu.release.exch.b32 Y12, [%rd1+4], X2; ld.global.cg.b32 Y13, [%rd1+4];
	atom.global.gpu.acq_rel.or.b32 Y14, [%rd1+8], X3; ld.global.cg.b32 Y15, [%rd1+8];
"""),
    "words that host threads read, and the clock": Case("""
	mov.b64 %rd4, {X0, X1}; st.release.sys.global.b64 [%rd1+8], %rd4; ld.acquire.sys.global.b64 %rd5, [%rd1+8];
	mov.b64 {Y0, Y1}, %rd5; mov.u64 %rd6, %globaltimer; mov.u64 %rd7, %globaltimer;
	setp.ge.s64 %p1, %rd7, %rd6; selp.b32 Y2, 1, 0, %p1;
"""),
    "asynchronous copies": Case(f"""
	{_SHARED} and.b32 T3, %r0, 1; shl.b32 T3, T3, 4; xor.b32 T2, %r0, 5; shl.b32 T2, T2, 6; add.s32 T2, T0, T2;
	cp.async.ca.shared.global [T1], [%rd1], 4; cp.async.ca.shared.global [T1+8], [%rd1+8], 8;
	st.shared.b32 [T1+4], X9; cp.async.commit_group;
	cp.async.cg.shared.global [T1+16], [%rd1+16], 16; cp.async.ca.shared.global [T1+32], [%rd1+32], 16;
	cp.async.cg.shared.global [T1+48], [%rd1+48], 16, T3; cp.async.commit_group;
	cp.async.wait_group 1; bar.sync 0; ld.shared.v4.b32 {{Y0, Y1, Y2, Y3}}, [T2];
	cp.async.wait_group 0; bar.sync 0; ld.shared.v4.b32 {{Y4, Y5, Y6, Y7}}, [T2+16];
	ld.shared.v4.b32 {{Y8, Y9, Y10, Y11}}, [T2+32]; ld.shared.v4.b32 {{Y12, Y13, Y14, Y15}}, [T2+48];
"""),
    "matrices in shared memory": Case("""
	mov.u32 T0, global_smem; shl.b32 T1, %r0, 4; add.s32 T1, T0, T1; add.s32 T2, T1, 512; add.s32 T3, T1, 1024;
	stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [T1], {X0, X1, X2, X3};
	stmatrix.sync.aligned.m8n8.x4.shared.b16 [T2], {X0, X1, X2, X3};
	st.shared.v4.b32 [T3], {X4, X5, X6, X7}; bar.sync 0;
	ld.shared.v2.b32 {Y0, Y1}, [T1]; ld.shared.v2.b32 {Y2, Y3}, [T2];
	ldmatrix.sync.aligned.m8n8.x4.shared.b16 {Y4, Y5, Y6, Y7}, [T3];
	ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {Y8, Y9, Y10, Y11}, [T3];
	ldmatrix.sync.aligned.m8n8.x2.shared.b16 {Y12, Y13}, [T3];
	ldmatrix.sync.aligned.m8n8.x1.shared.b16 {Y14}, [T3];
"""),
    "products of a warp": Case("""
	and.b32 T0, X6, 15; and.b32 T1, X7, 15; cvt.rn.f32.s32 T2, T0; cvt.rn.f32.s32 T3, T1; neg.f32 T4, T2;
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {Y0, Y1, Y2, Y3}, {X0, X1, X2, X3}, {X4, X5}, {T2, T3, T4, T3};
""", "whole bf16"),
    "products of four warps": Case("""
	mov.u32 T0, global_smem; shl.b32 T1, %r0, 5; add.s32 T1, T0, T1;
	st.shared.v4.b32 [T1], {X0, X1, X2, X3}; st.shared.v4.b32 [T1+16], {X4, X5, X6, X7};
	fence.proxy.async.shared::cta; bar.sync 0; setp.lt.s32 %p1, T0, 0; setp.ge.s32 %p2, T0, 0;
	shr.u32 T2, T0, 4; and.b32 T2, T2, 0x3FFF; or.b32 T2, T2, 0x10000; mov.b32 T3, 0x40000040; mov.b64 %rd4, {T2, T3};
	add.s64 %rd5, %rd4, 2;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 RESULTS, {X8, X9, X10, X11}, %rd4, %p1, 1, 1, 0;
	wgmma.commit_group.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 RESULTS, {X12, X13, X14, X15}, %rd5, %p2, 1, 1, 0;
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
""".replace("RESULTS", f"{{{', '.join(f'Y{i}' for i in range(16))}}}"), "whole bf16", threads=128),
    "barriers of warps": Case(f"""
	{_SHARED} {_OTHER} {_PUBLISH} bar.sync 0; ld.shared.v4.b32 {{Y0, Y1, Y2, Y3}}, [T2]; barrier.sync 1, 64;
	st.shared.v4.b32 [T1], {{X4, X5, X6, X7}}; barrier.sync 1, 64; ld.shared.v4.b32 {{Y4, Y5, Y6, Y7}}, [T2];
""", threads=64),
    "barriers in shared memory": Case(f"""
	{_SHARED} {_OTHER} add.s32 T3, T0, 8192; setp.eq.s32 %p1, %r0, 0;
	@%p1 mbarrier.init.shared::cta.b64 [T3], 64; bar.sync 0;
	{_PUBLISH} mbarrier.arrive.shared::cta.b64 _, [T3];
$W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [T3], 0; @!%p2 bra $W;
	ld.shared.v4.b32 {{Y0, Y1, Y2, Y3}}, [T2]; mbarrier.arrive.shared::cta.b64 _, [T3];
$V: mbarrier.try_wait.parity.shared::cta.b64 %p2, [T3], 1; @!%p2 bra $V;
	st.shared.v4.b32 [T1], {{X4, X5, X6, X7}}; bar.sync 0; ld.shared.v4.b32 {{Y4, Y5, Y6, Y7}}, [T2];
""", threads=64),
    "the copy engine": Case("""
	mov.u32 T0, global_smem; shl.b32 T1, %r0, 5; add.s32 T1, T0, T1; add.s32 T3, T0, 8192; add.s32 T4, T0, 1024;
	setp.eq.s32 %p1, %r0, 0; mov.b64 %rd4, kernel_param_2; cvta.param.u64 %rd5, %rd4;
	@%p1 mbarrier.init.shared::cta.b64 [T3], 1; fence.proxy.async.shared::cta; bar.sync 0;
	@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [T3], 2048; mov.b32 T5, 0; mov.b32 T6, 64; mov.b32 T7, 4;
	@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [T0], [%rd5, {T5, T7}], [T3];
	@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [T4], [%rd5, {T6, T5}], [T3];
$W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [T3], 0; @!%p2 bra $W;
	ld.shared.v4.b32 {Y0, Y1, Y2, Y3}, [T1]; ld.shared.v4.b32 {Y4, Y5, Y6, Y7}, [T1+16];
	ld.shared.v4.b32 {Y8, Y9, Y10, Y11}, [T1+1024]; ld.shared.v4.b32 {Y12, Y13, Y14, Y15}, [T1+1040];
""", matrix=True),
}  # fmt: skip
#: of the copy engine's matrix: rows, columns and the stride of rows, in numbers of 16 bits; and a box of it
MATRIX, STRIDE, BOX = (10, 100), 104, (8, 64)
