model_engine, optimizer, _, _ = deepspeed.initialize( model=model, model_parameters=model.parameters(), config='ds_config.json' )
