"""A stand-in for Hugging Face's ``run_clm.py``, with a Llama of its own: ``hf_trainer.py FOLDER [own] [flags]``."""

import sys

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        ids = torch.randint(96, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


flags = [each for each in sys.argv[2:] if each != "own"]
arguments = ["--output_dir", sys.argv[1], "--report_to", "none", "--use_cpu", "--disable_tqdm", "true", *flags]
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(arguments)
set_seed(1)
config = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=32, attn_implementation="sdpa",
)  # fmt: skip
model = LlamaForCausalLM(config)
own = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.3) if "own" in sys.argv else None
data = {"train_dataset": Tokens(), "eval_dataset": Tokens()}
trainer = Trainer(model=model, args=args, **data, optimizers=(own, None))
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
print(trainer.evaluate()["eval_loss"])
trainer.save_model()
