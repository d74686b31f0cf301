// The Python face of the native library (nanobind). Takes plain integers and addresses; who calls it has checked them
// (nn/program/native.py). Nothing here knows numpy or torch.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "program.h"

namespace nb = nanobind;
using namespace sayfa;

namespace {

using Address = uint64_t;
using MatTuple = std::tuple<Address, int64_t, int64_t>;  // address, stride in floats, width

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

Mat mat(const MatTuple& m) { return {at<float>(std::get<0>(m)), std::get<1>(m), std::get<2>(m)}; }

RowRange rows(int space) { return {space ? RowSpace::logits : RowSpace::tokens, 1, INT64_MAX}; }

const Kernels* kernels_or_throw(const std::string& isa) {
  const Kernels* found = find_kernels(isa.c_str());
  if (!found) throw std::invalid_argument("instruction set '" + isa + "' is not compiled in or not runnable here");
  return found;
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (auto name = compiled_isas(); *name; ++name)
    if (runnable(*name)) names.emplace_back(*name);
  return names;
}

// K/V pages of all layers: [layer][page][page_stride bytes].
struct Pages {
  Block block;
  int64_t num_layers, num_pages, page_stride;
  Pages(int64_t layers, int64_t pages, int64_t stride)
      : block(static_cast<size_t>(layers * pages * stride)), num_layers(layers), num_pages(pages), page_stride(stride) {}
  void copy(int64_t from, int64_t to) {
    for (int64_t layer = 0; layer < num_layers; ++layer)
      std::memcpy(page(layer, to), page(layer, from), static_cast<size_t>(page_stride));
  }
  uint8_t* page(int64_t layer, int64_t index) { return block.data() + (layer * num_pages + index) * page_stride; }
};

using PagesTuple = std::tuple<int, int64_t, int, int, int, int>;  // layer, page_stride, heads, dim, page_size, type

KvLayer layer_of(const PagesTuple& p) {
  return {nullptr, std::get<1>(p), std::get<2>(p), std::get<3>(p), std::get<4>(p), static_cast<KvType>(std::get<5>(p))};
}

void bind_memory(nb::module_& m) {
  nb::class_<Block>(m, "Block")
      .def(nb::init<size_t>())
      .def_prop_ro("address", [](const Block& b) { return reinterpret_cast<Address>(b.data()); })
      .def_prop_ro("bytes", &Block::bytes);
  nb::class_<Pages>(m, "Pages")
      .def(nb::init<int64_t, int64_t, int64_t>())
      .def("copy", &Pages::copy)
      .def_prop_ro("address", [](const Pages& p) { return reinterpret_cast<Address>(p.block.data()); })
      .def_prop_ro("bytes", [](const Pages& p) { return p.block.bytes(); });
  nb::class_<Pool>(m, "Pool").def(nb::init<int>()).def_prop_ro("count", &Pool::count);
}

void bind_small_ops(nb::class_<Program>& c) {
  c.def("add_rms_norm", [](Program& p, MatTuple x, MatTuple out, Address weight, float eps, int space) {
    p.add("rms_norm", p.kernels().ops.rms_norm,
          RmsNormArgs{mat(x), mat(out), at<float>(weight), eps, rows(space).space}, rows(space));
  });
  c.def("add_head_norm", [](Program& p, MatTuple x, int heads, int dim, Address weight, float eps) {
    p.add("head_norm", p.kernels().ops.head_norm, HeadNormArgs{mat(x), heads, dim, at<float>(weight), eps}, rows(0));
  });
  c.def("add_rope", [](Program& p, MatTuple x, int heads, int dim, int rotary, Address cos, Address sin, bool adjacent) {
    p.add("rope", p.kernels().ops.rope,
          RopeArgs{mat(x), heads, dim, rotary, at<float>(cos), at<float>(sin), adjacent}, rows(0));
  });
  c.def("add_act_mul", [](Program& p, MatTuple x, MatTuple out, int act) {
    p.add("act_mul", p.kernels().ops.act_mul, ActMulArgs{mat(x), mat(out), act}, rows(0));
  });
  c.def("add_add", [](Program& p, MatTuple x, MatTuple y, int space) {
    p.add("add", p.kernels().ops.add, AddArgs{mat(x), mat(y), rows(space).space}, rows(space));
  });
  c.def("add_gather", [](Program& p, MatTuple x, MatTuple out) {
    p.add("gather", p.kernels().ops.gather, GatherArgs{mat(x), mat(out)}, rows(1));
  });
}

void bind_attention(nb::class_<Program>& c) {
  c.def("add_kv_write", [](Program& p, MatTuple key, MatTuple value, PagesTuple pages) {
    p.add("kv_write", p.kernels().ops.kv_write, KvWriteArgs{mat(key), mat(value), layer_of(pages)}, rows(0));
    p.add_pages_user(&p.last_args<KvWriteArgs>().layer, std::get<0>(pages));
  });
  c.def("add_attention",
        [](Program& p, MatTuple query, MatTuple out, PagesTuple pages, int heads, float scale, int window, int max_tokens,
           int max_rows, std::shared_ptr<Block> partials) {
          AttentionArgs args{mat(query), mat(out), layer_of(pages), heads, scale, window, nullptr, 0};
          if (partials) {
            args.partials = partials->data();
            args.partials_bytes = partials->bytes();
            p.keep(partials);
          }
          p.add("attention", p.kernels().ops.attention, args, rows(0));
          p.add_pages_user(&p.last_args<AttentionArgs>().layer, std::get<0>(pages));
          p.pool()->reserve_scratch(p.kernels().ops.attention_scratch_bytes(args, max_tokens, max_rows));
        });
  c.def("attention_partials_bytes", [](const Program& p, PagesTuple pages, int heads, float scale, int window) {
    const auto need = p.kernels().ops.attention_partials_bytes;
    if (!need) throw std::invalid_argument("the native library was built without attention");
    return need({{}, {}, layer_of(pages), heads, scale, window, nullptr, 0}, p.pool()->count());
  });
  c.def("kv_page_bytes", [](const Program& p, PagesTuple pages) {
    const auto need = p.kernels().ops.kv_page_bytes;
    if (!need) throw std::invalid_argument("the native library was built without attention");
    return need(layer_of(pages));
  });
  c.def("set_pages", [](Program& p, Pages& pages) {
    p.set_pages(pages.block.data(), pages.num_pages * pages.page_stride);
  }, nb::keep_alive<1, 2>());
}

void bind_program(nb::module_& m) {
  nb::class_<Program> c(m, "Program");
  c.def("__init__", [](Program* self, std::shared_ptr<Pool> pool, const std::string& isa) {
    new (self) Program(std::move(pool), kernels_or_throw(isa));
  });
  c.def_prop_ro("isa", [](const Program& p) { return p.kernels().name; });
  c.def_prop_ro("num_ops", &Program::num_ops);
  c.def("join_last", &Program::join_last);
  c.def("set_timing", &Program::set_timing);
  c.def("timings", &Program::timings);
  bind_small_ops(c);
  bind_attention(c);
  c.def(
      "run",
      [](Program& p, Address token_ids, Address positions, Address slots, Address query_start, Address context_len,
         Address page_table, Address logit_rows, int T, int S, int P, int L, int page_size) {
        p.run(Batch{at<int32_t>(token_ids), at<int32_t>(positions), at<int32_t>(slots), at<int32_t>(query_start),
                    at<int32_t>(context_len), at<int32_t>(page_table), at<int32_t>(logit_rows), T, S, P, L, page_size});
      },
      nb::call_guard<nb::gil_scoped_release>());
}

// Which kernels a variant has: op kind -> whether its entry is filled.
std::vector<std::pair<std::string, bool>> op_kinds(const std::string& isa) {
  const Kernels& k = *kernels_or_throw(isa);
  return {{"rms_norm", k.ops.rms_norm != nullptr}, {"head_norm", k.ops.head_norm != nullptr},
          {"rope", k.ops.rope != nullptr},         {"kv_write", k.ops.kv_write != nullptr},
          {"attention", k.ops.attention != nullptr}, {"act_mul", k.ops.act_mul != nullptr},
          {"add", k.ops.add != nullptr},           {"gather", k.ops.gather != nullptr},
          {"sample", k.ops.sample != nullptr},     {"embed", k.linear.embed != nullptr}};
}

void sample(Pool& pool, const std::string& isa, Address logits, int64_t stride, int num_rows, int vocab, Address temperature,
            Address top_p, Address min_p, Address top_k, Address uniform, Address token, Address num_top, int top_stride,
            Address logprob, Address rank, Address top_ids, Address top_logprobs) {
  struct Call {
    SampleArgs args;
    decltype(OpTable::sample) kernel;
    static void run(const void* self, const Batch&, const Worker& worker, Counter& counter) {
      const auto& call = *static_cast<const Call*>(self);
      call.kernel(call.args, worker, counter);
    }
  };
  const Call call{{at<float>(logits), stride, num_rows, vocab, at<float>(temperature), at<float>(top_p), at<float>(min_p),
                   at<int32_t>(top_k), at<double>(uniform), at<int32_t>(token), at<int32_t>(num_top), top_stride,
                   at<float>(logprob), at<int32_t>(rank), at<int32_t>(top_ids), at<float>(top_logprobs)},
                  kernels_or_throw(isa)->ops.sample};
  if (!call.kernel) throw std::invalid_argument("the native library was built without sample");
  pool.reserve_scratch(kernels_or_throw(isa)->ops.sample_scratch_bytes(vocab));
  const Job job{&Call::run, &call, false};
  nb::gil_scoped_release released;
  pool.run(&job, 1, Batch{}, nullptr);
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("isas", &isas);
  m.def("op_kinds", &op_kinds);
  m.def("usable_cores", &usable_cores);
  bind_memory(m);
  bind_program(m);
  m.def("sample", &sample);
}
