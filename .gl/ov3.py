import torch, time, vbrt, statistics, sys, copy
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(3)
m=LlamaForCausalLM(LlamaConfig(vocab_size=128,hidden_size=256,intermediate_size=512,num_hidden_layers=32,num_attention_heads=4,num_key_value_heads=2)).eval().to(torch.bfloat16).cuda()
vb=vbrt.wrap(copy.deepcopy(m),"dense",weights={"min_parameters":1}).materialize()
vb2=vbrt.wrap(copy.deepcopy(m),"dense",weights={"min_parameters":1}).materialize()
vb2._marker.before_pass=None
ids=torch.tensor([[5]]).cuda()
runs={"plain":m,"vb":vb,"nobalance":vb2,"inner":vb2.model}
def bench(n=150):
    ts={k:[] for k in runs}
    with torch.no_grad():
        for i in range(n):
            for k,r in runs.items():
                torch.cuda.synchronize(); t=time.perf_counter(); r(input_ids=ids,use_cache=False); torch.cuda.synchronize(); ts[k].append(time.perf_counter()-t)
    for k,v in ts.items(): print(k, round(sorted(v)[n//10]*1e3,2), round(statistics.median(v)*1e3,2))
bench()
for l in vb2.registry.values():
    h=l.handle; h.resident = h.resident.detach()
print("detached"); bench()
for l in vb2.registry.values():
    h=l.handle; h.resident = torch.nn.Parameter(h.resident.detach().clone())
print("own memory parameter"); bench()
import cProfile,pstats
for name in ("plain","vb"):
    pr=cProfile.Profile(); 
    with torch.no_grad():
        pr.enable()
        for _ in range(20): runs[name](input_ids=ids,use_cache=False)
        pr.disable()
    print(name); pstats.Stats(pr).sort_stats("tottime").print_stats(12)
