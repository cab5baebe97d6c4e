"""What other programs call the keys of a configuration, for the advice of errors."""

from __future__ import annotations

_OTHER_WORDS = {
    "optimizer.learning_rate": "lr learn_rate learningrate eta step_size",
    "optimizer.embedding.learning_rate": "embedding_lr emb_lr sparse_lr row_lr embedding_learning_rate",
    "optimizer.weight_decay": "wd l2 l2_reg reg regularization decay_rate",
    "optimizer.name": "opt optim optimiser optimizer",
    "optimizer.max_global_norm": "clip grad_clip clip_norm max_norm max_grad_norm gradient_clipping",
    "lr_schedule.kind": "scheduler lr_scheduler",
    "lr_schedule.warmup_steps": "warmup warm_up",
    "data.path": "data dataset data_path data_dir input train_data",
    "data.batch_size": "bs batch batchsize train_batch_size minibatch per_device_batch_size",
    "data.eval_batch_size": "eval_bs test_batch_size valid_batch_size",
    "data.workers": "num_workers n_jobs",
    "model.kind": "model arch architecture model_type model_name",
    "model.embedding_dim": "dim emb_dim embed_dim embedding_size emb_size d_model latent_dim factors n_factors",
    "model.top_mlp": "mlp layers hidden hidden_units hidden_dims dnn_hidden_units",
    "model.dropout": "drop dropout_rate drop_rate p_drop",
    "model.batch_norm": "bn batchnorm use_bn",
    "model.compute_dtype": "dtype precision amp fp16 bf16",
    "model.members": "ensemble n_models n_estimators",
    "epochs": "epoch n_epochs num_epochs max_epochs passes",
    "max_steps": "steps n_steps num_steps iterations n_iter max_iter",
    "seed": "random_state random_seed rng rng_seed",
    "out": "output output_dir out_dir save_dir dir folder run_dir logdir",
    "init_from": "pretrained warm_start finetune_from",
    "evaluate.early_stopping.patience": "early_stop early_stopping earlystopping early_stopping_rounds",
    "evaluate.every_steps": "eval_every eval_steps eval_interval",
    "checkpoint.every_steps": "save_every save_steps save_interval",
    "log.every_steps": "log_every log_interval logging_steps print_freq",
    "log.to": "wandb mlflow tracker logger",
    "log.progress": "verbose quiet silent",
    "mesh.devices": "gpus n_gpus num_gpus num_devices world_size",
}
SYNONYMS = {word: key for key, text in _OTHER_WORDS.items() for word in text.split()}
"""Keys by other words for them."""
